"""Micro-batches of pairs of answers: each pair's two texts are sequences of one batch that do not see each other.

They may share the start of their prompt (`tasks.shared_keys`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from data.sequences.pairs import AnswerPair
from data.sequences.tokenized import TokenSequence
from data.tokens.labels import IGNORE_INDEX
from tasks.causal_batches import CausalMicroBatch, Collator
from tasks.micro_batch import BatchShape
from tasks.shared_keys import keys_with, positions_with, shared_starts


@dataclass(frozen=True, kw_only=True)
class PairMicroBatch(CausalMicroBatch):
    """A CausalMicroBatch whose answers are 0, 1, 2, ...: the chosen one of each pair, then its rejected one."""

    answers: torch.Tensor  # int64 [n], the answer of each of `targets`
    answer_lengths: torch.Tensor  # fp32 [2 x pairs], label tokens of each answer
    reference: torch.Tensor  # fp32 [pairs, 2], log-probabilities of the answers before training
    cu_seqlens_k: torch.Tensor | None = None  # this and the others as of `SharedKeys`; None: nothing is shared
    max_seqlen_k: int = 0
    key_places: torch.Tensor | None = None
    key_copies: torch.Tensor | None = None

    @property
    def num_pairs(self) -> int:
        return len(self.reference)

    @property
    def num_loss_terms(self) -> int:
        """The loss is a mean over pairs."""
        return self.num_pairs


@dataclass(frozen=True)
class PairCollator:
    """Makes a PairMicroBatch of rows of pairs. Under padding each of a pair's two texts has a row to itself.

    A row may also hold sequences that are no pair, of which the loss has no term: trials compute their tokens' losses.

    Attributes:
        shares_prompts: pairs may share prompts. Then every batch says which keys it sees, so that layers are compiled
            once, and `collate` gives offsets to all.
    """

    collate: Collator
    shares_prompts: bool = False

    def __call__(self, rows: list[list[Any]]) -> PairMicroBatch:
        parted = [[text for pair in row for text in parts_of(pair)] for row in rows]
        texts = [text for row in parted for text in row]
        batch = self.collate(parted if self.collate.packing else [[text] for text in texts])
        lengths = np.array([_num_labels(text) for text in texts], dtype=np.int64)
        # A batch without labels keeps one position (`data.tokens.labels`).
        answers = np.repeat(np.arange(len(texts)), lengths) if lengths.sum() else np.zeros(1, dtype=np.int64)
        pairs = [pair for row in rows for pair in row if isinstance(pair, AnswerPair)]
        reference = np.array([pair.reference for pair in pairs], dtype=np.float32).reshape(-1, 2)
        keys: dict[str, Any] = {}
        if self.shares_prompts:
            batch, keys = _sharing(batch, rows)
        return PairMicroBatch(
            **vars(batch),
            **keys,
            answers=torch.from_numpy(answers),
            answer_lengths=torch.from_numpy(lengths.astype(np.float32)),
            reference=torch.from_numpy(reference),
        )


def _sharing(batch: CausalMicroBatch, rows: list[list[Any]]) -> tuple[CausalMicroBatch, dict[str, Any]]:
    """The batch with the positions of rejected texts that begin in chosen ones, and its keys."""
    assert batch.position_ids is not None, "rows that share prompts are packed"
    starts = shared_starts(rows, batch.input_ids.shape[1])
    pairs = batch.num_attended_pairs + int((starts.num_shared * starts.lengths).sum())
    positions = positions_with(starts, batch.position_ids)
    return replace(batch, position_ids=positions, num_attended_pairs=pairs), vars(keys_with(starts, batch))


def parts_of(pair: AnswerPair | TokenSequence) -> list[TokenSequence]:
    """The two parts of a pair in a row, the chosen text first; a sequence that is no pair as it is."""
    return pair.parts if isinstance(pair, AnswerPair) else [pair]


def texts_of(pair: AnswerPair | TokenSequence) -> list[TokenSequence]:
    """The two texts of a pair, the chosen one first; a sequence that is no pair as it is."""
    return pair.texts if isinstance(pair, AnswerPair) else [pair]


def _num_labels(text: TokenSequence) -> int:
    return int((text.labels[1:] != IGNORE_INDEX).sum())  # a first token follows nothing


def shape_of_pairs(shape: BatchShape) -> BatchShape:
    """The shape of a micro-batch of rows of the data. A padded one is a pair, whose texts have a row each."""
    if shape.packed:
        return shape
    return replace(shape, rows=2 * shape.rows, widths=(max(2, -(-shape.width // 2)),))


def keys_of(batch: PairMicroBatch) -> dict[str, Any]:
    """The arguments by which attention finds the keys of a batch; nothing if sequences share none."""
    if batch.key_places is None:
        return {}
    offsets = {"cu_seq_lens_k": batch.cu_seqlens_k, "max_length_k": batch.max_seqlen_k}
    return offsets | {"key_places": batch.key_places, "key_copies": batch.key_copies}
