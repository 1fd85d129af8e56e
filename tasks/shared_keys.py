"""Which keys the queries of a micro-batch see, if the rejected text of a pair has its prompt in the chosen one.

In a row such a pair is two sequences, [prompt, chosen answer] and [last token of the prompt, rejected answer]. The
positions of the second one go on from the prompt, and its keys are those of the prompt and its own: the keys of all
sequences lie end to end as [prompt, chosen answer], [copy of the prompt, its last token, rejected answer].
`policies.attention.shared_keys` copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.sequences.pairs import AnswerPair, tokens_between
from data.sequences.tokenized import TokenSequence
from tasks.causal_batches import CausalMicroBatch


@dataclass(frozen=True)
class SharedKeys:
    """Where the keys of a micro-batch come from. Tokens count in the flattened [batch x seq]."""

    cu_seqlens_k: torch.Tensor  # int32 [sequences + 1], where the keys of each sequence begin
    max_seqlen_k: int  # the most keys of a sequence
    key_places: torch.Tensor  # int64 [keys], the token that each is of
    key_copies: torch.Tensor  # int64 [2, tokens], each token's own key, and a copy of it; -1: there is none


@dataclass(frozen=True)
class SharedStarts:
    """The sequences of a batch that begin in another one; int64 arrays of one length, in the order of the batch."""

    places: np.ndarray  # where each begins itself
    lengths: np.ndarray
    from_places: np.ndarray  # where its start is
    num_shared: np.ndarray  # the tokens of that start


def shared_starts(rows: Sequence[Sequence[AnswerPair | TokenSequence]], width: int) -> SharedStarts:
    """The rejected texts of these rows.

    Args:
        width: of a row in the batch.
    """
    found = []
    for number, row in enumerate(rows):
        place = number * width
        for pair in row:
            if isinstance(pair, AnswerPair):
                num_rest = len(pair.input_ids) - pair.num_chosen
                found.append((place + pair.num_chosen, num_rest, place, pair.num_shared))
            place += len(pair.input_ids)
    return SharedStarts(*np.array(found, dtype=np.int64).reshape(-1, 4).T)


def positions_with(starts: SharedStarts, position_ids: torch.Tensor) -> torch.Tensor:
    """The position ids with sequences that go on from their starts, int64 [batch, seq]."""
    positions = position_ids.numpy().copy()
    places = tokens_between(starts.places, starts.places + starts.lengths)
    positions.reshape(-1)[places] += np.repeat(starts.num_shared, starts.lengths)
    return torch.from_numpy(positions)


def keys_with(starts: SharedStarts, batch: CausalMicroBatch) -> SharedKeys:
    """The keys of a batch whose `cu_seqlens` part all of its sequences."""
    assert batch.cu_seqlens is not None
    offsets = batch.cu_seqlens.numpy().astype(np.int64)
    begins, ends = offsets[:-1], offsets[1:]
    num_shared, froms = np.zeros_like(begins), np.zeros_like(begins)
    sequences = np.searchsorted(begins, starts.places)
    num_shared[sequences], froms[sequences] = starts.num_shared, starts.from_places
    before = np.concatenate([[0], np.cumsum(num_shared)])
    cu_seqlens = offsets + before
    parts = [np.stack(of, axis=1).reshape(-1) for of in ((froms, begins), (froms + num_shared, ends))]
    copies = np.full((2, batch.input_ids.numel()), -1, dtype=np.int64)
    copies[0] = np.arange(copies.shape[1]) + np.repeat(before[1:], ends - begins)
    copies[1, tokens_between(froms, froms + num_shared)] = tokens_between(cu_seqlens[:-1], cu_seqlens[:-1] + num_shared)
    return SharedKeys(
        torch.from_numpy(cu_seqlens.astype(np.int32)),
        int(np.diff(cu_seqlens).max()),
        torch.from_numpy(tokens_between(*parts)),
        torch.from_numpy(copies),
    )
