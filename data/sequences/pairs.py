"""Pairs of answers to one prompt: a chosen and a rejected one, end to end as one sequence of the data.

So a pair is never parted: it is packed, shuffled and given to a rank as a whole. A task parts it when it makes a batch
(`tasks.pair_batches`), where its two texts are sequences that do not see each other. Both begin with the same prompt,
and if the model's attention lets them share it (`share_prompts`), it is there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from data.sequences.causal import Truncation
from data.sequences.flattening import flatten
from data.sequences.tokenized import COUNT_COLUMNS, Sequences, TokenSequence
from data.tokens.labels import IGNORE_INDEX
from utils.errors import ConfigError
from utils.wording import plural


class AnswerPair(NamedTuple):
    """Both texts of a pair end to end, each the prompt with an answer; the chosen one first.

    The first `num_shared` tokens of the chosen text are the rejected one's, too, and are not there again.
    """

    input_ids: np.ndarray  # int32 [tokens]
    labels: np.ndarray  # int32 [tokens], not shifted; IGNORE_INDEX where the loss mask is off
    source_row: int  # as of a TokenSequence
    num_chosen: int  # tokens of the chosen text
    reference: np.ndarray  # fp32 [2], as of `AnswerPairs`
    num_shared: int = 0

    @property
    def parts(self) -> list[TokenSequence]:
        """The chosen text, and what the rejected one does not share with it."""
        parts = (slice(None, self.num_chosen), slice(self.num_chosen, None))
        return [TokenSequence(self.input_ids[part], self.labels[part], self.source_row) for part in parts]

    @property
    def texts(self) -> list[TokenSequence]:
        """The two texts, the chosen one first."""
        chosen, rest = self.parts
        ids, labels = (np.concatenate([c[: self.num_shared], r]) for c, r in zip(chosen[:2], rest[:2], strict=True))
        return [chosen, TokenSequence(ids, labels, self.source_row)]


@dataclass(frozen=True)
class AnswerPairs(Sequences):
    """Pairs end to end in flat arrays: pair i has the tokens `input_ids[offsets[i]:offsets[i + 1]]`."""

    WHY_NOT_CUT: ClassVar[str] = "--truncation; answers are never cut"
    NO_LABEL: ClassVar[str] = "both answers are the same, or one is empty"

    chosen_lengths: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # int64 [pairs], of the first text
    reference: np.ndarray | None = None  # fp32 [pairs, 2], log-probabilities of the answers before training
    num_shared: np.ndarray | None = None  # int64 [pairs], as of `AnswerPair`; None: nothing is shared

    def __getitem__(self, index: int) -> AnswerPair:  # type: ignore[override]
        sequence = super().__getitem__(index)
        reference = np.zeros(2, np.float32) if self.reference is None else self.reference[index]
        return AnswerPair(*sequence, int(self.chosen_lengths[index]), reference, int(self.shared_lengths[index]))

    @property
    def shared_lengths(self) -> np.ndarray:
        """Tokens that each rejected text shares with the chosen one, int64 [pairs]."""
        return np.zeros_like(self.chosen_lengths) if self.num_shared is None else self.num_shared

    @property
    def text_lengths(self) -> tuple[np.ndarray, ...]:
        return self.chosen_lengths, self.lengths - self.chosen_lengths

    @property
    def content(self) -> tuple[np.ndarray, ...]:
        return *super().content, self.chosen_lengths, *(() if self.num_shared is None else (self.num_shared,))

    def describe(self, split: str) -> list[str]:
        lines = super().describe(split)
        if (num_shared := int(self.shared_lengths.sum())) > 0:
            share = num_shared / (len(self.input_ids) + num_shared)
            lines.append(f"{split}: the answers of a pair share their prompt: {100 * share:.0f} % of all tokens less")
        return lines

    def more_of_joined(self, parts: Sequence[Sequences]) -> dict[str, Any]:
        pairs = [part for part in parts if isinstance(part, AnswerPairs)]
        is_shared = any(part.num_shared is not None for part in pairs)
        return {
            "chosen_lengths": np.concatenate([part.chosen_lengths for part in pairs]),
            "num_shared": np.concatenate([part.shared_lengths for part in pairs]) if is_shared else None,
        }


def build_pairs(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str,
    context_length: int,
    truncation: Truncation = "left",
    first_row: int = 0,
    is_part: bool = False,
    shares_prompts: bool = False,
) -> AnswerPairs:
    """Pairs that fit into a row with both of their texts, each with a label.

    Of a pair that does not fit, the first tokens of the prompt are cut, as many in both texts; of answers nothing is.

    Args:
        rows: each with two texts end to end, the chosen one first, and their lengths in `sample_lengths`.
        context_length: the most tokens of both texts together.
        truncation: for a pair that is longer: cut its prompt (left), leave it out (drop), or refuse the data (error).
            A pair whose prompt is too short to cut is left out.
        first_row, is_part: as of `data.sequences.causal.build_sequences`.
        shares_prompts: of tokens that both texts begin with, the rejected one has none. They count when pairs are cut:
            what is learned does not depend on this.

    Raises:
        ConfigError: columns that are wrong, a row without two texts, a pair that is too long under `error`, no pair
            left.
    """
    flat = flatten(rows, name, first_row)
    if flat.of_tokens:
        columns = ", ".join(sorted(flat.of_tokens))
        raise ConfigError(
            f"dataset ({name}): {columns}: a loss of pairs has no weights or teachers of tokens; leave it out"
        )
    pairs = cut_pairs(flat, name=name, context_length=context_length, truncation=truncation)
    if len(pairs) == 0 and not is_part:
        num_rows = plural(len(np.unique(flat.source_rows)), "row")
        raise ConfigError(
            f"dataset ({name}): none of its {num_rows} has two different answers that fit into --context_length "
            f"{context_length} with a part of their prompt; check the data, or raise --context_length"
        )
    return share_prompts(pairs) if shares_prompts else pairs


def share_prompts(pairs: AnswerPairs) -> AnswerPairs:
    """The pairs without those first tokens of rejected texts that chosen ones begin with, too.

    The last token of a prompt stays in both: it predicts the first one of each answer.
    """
    starts = pairs.offsets[:-1] + pairs.chosen_lengths
    num_shared = np.maximum(0, _num_alike(pairs) - 1)
    if not num_shared.any():
        return pairs
    is_kept = np.ones(len(pairs.input_ids), dtype=bool)
    is_kept[tokens_between(starts, starts + num_shared)] = False
    offsets = pairs.offsets - np.concatenate([[0], np.cumsum(num_shared)])
    return replace(
        pairs,
        input_ids=pairs.input_ids[is_kept],
        labels=pairs.labels[is_kept],
        offsets=offsets,
        label_offsets=offsets,
        num_shared=num_shared,
    )


def _num_alike(pairs: AnswerPairs) -> np.ndarray:
    """How many tokens the prompts of both texts begin with that are the same, int64 [pairs]."""
    starts = np.stack([pairs.offsets[:-1], pairs.offsets[:-1] + pairs.chosen_lengths], axis=1)
    of_texts = np.append(starts.reshape(-1), pairs.offsets[-1])
    num_alike = _prompt_lengths(pairs.labels, of_texts)[0].reshape(-1, 2).min(1)
    places = tokens_between(starts[:, 0], starts[:, 0] + num_alike)
    others = places + np.repeat(pairs.chosen_lengths, num_alike)
    numbers = np.repeat(np.arange(len(pairs)), num_alike)
    differs = pairs.input_ids[places] != pairs.input_ids[others]
    np.minimum.at(num_alike, numbers[differs], (places - starts[numbers, 0])[differs])
    return num_alike


def cut_pairs(flat: Sequences, *, name: str, context_length: int, truncation: Truncation) -> AnswerPairs:
    """The pairs of texts that follow each other, none longer than `context_length`.

    Args:
        flat: two sequences of each row, the chosen one first; one, which is empty, of a row that was left out.

    Raises:
        ConfigError: for a row without two texts; under `error`, for the first pair that is too long.
    """
    chosen = _first_of_pairs(flat, name)
    of_pairs = np.stack([chosen, chosen + 1], axis=1)
    starts, ends, rows = flat.offsets[of_pairs], flat.offsets[of_pairs + 1], flat.source_rows[chosen]
    prompts, has_label = (of_texts[of_pairs] for of_texts in _prompt_lengths(flat.labels, flat.offsets))
    has_labels = has_label.all(1)
    excess = np.maximum(0, (ends - starts).sum(1) - context_length)
    if truncation == "error" and excess.any():
        index = int(np.argmax(excess > 0))
        raise ConfigError(
            f"dataset ({name}), row {rows[index] + 1}: the {(ends - starts).sum(1)[index]} tokens of both answers with "
            f"their prompts are more than --context_length {context_length}; raise it, or give --truncation left or "
            "drop"
        )
    cut = -(-excess // 2)  # of each prompt
    is_empty = (starts == ends).any(1)
    # The first token of an answer follows one of the prompt at least.
    is_too_long = has_labels & ((cut > 0) & (cut >= prompts.min(1)) | (excess > 0) & (truncation == "drop"))
    kept = has_labels & ~is_too_long
    starts = starts + cut[:, None]
    lengths = (ends - starts)[kept]
    tokens = tokens_between(starts[kept].reshape(-1), ends[kept].reshape(-1))
    input_ids, labels = flat.input_ids[tokens], flat.labels[tokens]
    labels[_first_places(lengths.reshape(-1))] = IGNORE_INDEX  # nothing precedes a first token
    offsets = np.concatenate([[0], np.cumsum(lengths.sum(1))]).astype(np.int64)
    return AnswerPairs(
        input_ids=input_ids,
        labels=labels,
        offsets=offsets,
        label_offsets=offsets,
        source_rows=rows[kept],
        chosen_lengths=lengths[:, 0].copy(),
        num_truncated=int((cut[kept] > 0).sum()),
        num_tokens_cut=2 * int(cut[kept].sum()),
        num_too_long=int(is_too_long.sum()),
        num_without_label=int((~has_labels & ~is_empty).sum()),
        num_empty=int(is_empty.sum()) + len(flat) - 2 * len(chosen),
        **{column: getattr(flat, column) for column in COUNT_COLUMNS},
    )


def _first_of_pairs(flat: Sequences, name: str) -> np.ndarray:
    """The chosen sequence of each pair, as an index into all; the rejected one follows it.

    Raises:
        ConfigError: for a row that has neither two texts nor was left out.
    """
    numbers, firsts, counts = np.unique(flat.source_rows, return_index=True, return_counts=True)
    is_left_out = (counts == 1) & (flat.lengths[firsts] == 0)
    wrong = (counts != 2) & ~is_left_out
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ConfigError(
            f"dataset ({name}), row {numbers[index] + 1}: it has {plural(int(counts[index]), 'text')}, and preferences "
            "are learned from two, chosen and rejected, end to end with their lengths in sample_lengths"
        )
    return firsts[~is_left_out]


def _prompt_lengths(labels: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens before the first label of each text, int64 [texts], and whether it has one, bool [texts].

    A label on the first token of a text does not count.

    Args:
        offsets: where each text begins, and where the last ends.
    """
    labels = labels.copy()
    labels[_first_places(np.diff(offsets))] = IGNORE_INDEX
    places = np.append(np.flatnonzero(labels != IGNORE_INDEX), len(labels))
    firsts = places[np.searchsorted(places, offsets[:-1])]
    return firsts - offsets[:-1], firsts < offsets[1:]


def _first_places(lengths: np.ndarray) -> np.ndarray:
    """The places of first tokens of sequences end to end, of those that have any."""
    return (np.cumsum(lengths) - lengths)[lengths > 0]


def tokens_between(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The places of all tokens in the slices, in order, int64 [tokens]."""
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
