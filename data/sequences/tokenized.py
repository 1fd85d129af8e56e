"""Tokenized examples: one sequence by itself, and all sequences of a split in flat arrays."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from data.sequences.token_columns import TEACHER_IDS, TokenArrays
from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import MaskWay
from utils.errors import ConfigError
from utils.wording import plural


class TokenSequence(NamedTuple):
    """One tokenized example. Labels may be of another length than the inputs: the task that collates them knows."""

    input_ids: np.ndarray  # int32 [tokens]
    labels: np.ndarray  # int32 [labels], not shifted; IGNORE_INDEX where the loss mask is off
    source_row: int  # row of the data file, from 0; with several datasets see `data.batches.mixing.global_row`

    @property
    def of_tokens(self) -> TokenArrays:
        """Other columns of a causal model's tokens (`data.sequences.token_columns`); most have none."""
        return {}

    def with_columns(self, of_tokens: TokenArrays) -> TokenSequence:
        return SequenceWithColumns.of(self, of_tokens) if of_tokens else self


class SequenceWithColumns(TokenSequence):
    """A sequence whose tokens have weights or a teacher. `_replace` leaves them out."""

    _of_tokens: TokenArrays = MappingProxyType({})

    @classmethod
    def of(cls, sequence: TokenSequence, of_tokens: TokenArrays) -> SequenceWithColumns:
        made = cls(*sequence)
        made._of_tokens = of_tokens
        return made

    @property
    def of_tokens(self) -> TokenArrays:
        return self._of_tokens


class HasTokens(Protocol):
    """A sequence, or what holds one."""

    @property
    def input_ids(self) -> np.ndarray: ...


COUNT_COLUMNS = ("num_empty_answers", "num_special_as_text", "num_answers_joined", *MaskWay)
"""Columns of tokenized examples besides their tokens: counts, which `Sequences` sums up."""

Row = list[TokenSequence]
"""A row of a batch: one sequence under padding, several under packing."""


@dataclass(frozen=True)
class Sequences:
    """Sequences end to end in flat arrays: small in memory, and shared with forked workers.

    Sequence i has the tokens `input_ids[offsets[i]:offsets[i + 1]]` and the labels
    `labels[label_offsets[i]:label_offsets[i + 1]]`.
    """

    # Why samples are left out, for people.
    WHY_NOT_CUT: ClassVar[str] = "--truncation drop"
    NO_LABEL: ClassVar[str] = "no label token{within}"

    input_ids: np.ndarray  # int32 [tokens]
    labels: np.ndarray  # int32 [labels]
    offsets: np.ndarray  # int64 [sequences + 1]
    label_offsets: np.ndarray  # int64 [sequences + 1]; the same array as `offsets` if every token has a label
    source_rows: np.ndarray  # int64 [sequences]: the row of the data, from 0; messages count from 1
    labels_are_tokens: bool = True  # False: they are of a whole text (`data.tokens.labeled_texts`)
    num_truncated: int = 0
    num_tokens_cut: int = 0
    num_too_long: int = 0  # left out
    num_without_label: int = 0  # left out
    num_empty: int = 0  # left out
    num_split: int = 0  # longer than a row and made into several samples
    num_parts: int = 0  # the samples that they became
    num_parts_without_label: int = 0  # of these, left out; other parts of their sample are kept
    num_empty_answers: int = 0  # not learned
    num_special_as_text: int = 0  # examples that spell special tokens, which stay text
    num_answers_joined: int = 0  # examples where a token across the seam joins an answer to its prompt
    num_by_marks: int = 0  # conversations, by `MaskWay`
    num_by_prompts: int = 0
    num_by_turns: int = 0
    num_misplaced_labels: int = 0  # labels for a causal model that are not the token at their place
    num_targets_cut: int = 0  # labels apart from their inputs: targets that were longer than theirs may be
    num_target_tokens_cut: int = 0
    length_flags: tuple[str, ...] = ("context_length",)  # that limit the inputs, and labels that are apart from them
    of_tokens: TokenArrays = field(default_factory=dict)  # along the tokens of all sequences

    def __len__(self) -> int:
        return len(self.source_rows)

    def __getitem__(self, index: int) -> TokenSequence:
        return TokenSequence(
            self.input_ids[self.offsets[index] : self.offsets[index + 1]],
            self.labels[self.label_offsets[index] : self.label_offsets[index + 1]],
            int(self.source_rows[index]),
        ).with_columns(self._columns_of(index))

    def _columns_of(self, index: int) -> TokenArrays:
        return {name: values[self.offsets[index] : self.offsets[index + 1]] for name, values in self.of_tokens.items()}

    def __iter__(self) -> Iterator[TokenSequence]:
        return (self[index] for index in range(len(self)))

    def more_of_joined(self, parts: Sequence[Sequences]) -> dict[str, Any]:
        """The fields besides those of this class, of these sequences end to end (`data.batches.mixing`)."""
        return {}

    def figures(self, split: str) -> list[str]:
        """Lines on what the samples hold besides text."""
        return []

    @property
    def num_bytes_held(self) -> int:
        """Bytes of host memory that the samples hold besides their tokens."""
        return 0

    @property
    def lengths(self) -> np.ndarray:
        """Input tokens of each sequence, int64 [sequences]."""
        return np.diff(self.offsets)

    @property
    def text_lengths(self) -> tuple[np.ndarray, ...]:
        """Tokens of each sequence's texts, which do not see each other, int64 [sequences] each: here it is one."""
        return (self.lengths,)

    @property
    def shared_lengths(self) -> np.ndarray:
        """Tokens that the last of its texts has before its own, as those of the first one, int64 [sequences]."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def content(self) -> tuple[np.ndarray, ...]:
        """The arrays that say what is learned."""
        return self.input_ids, self.labels, *(self.of_tokens[name] for name in sorted(self.of_tokens))

    @property
    def num_image_tokens(self) -> np.ndarray | None:
        """Tokens of each sequence that stand for images, or may, int64 [sequences]; None if it has no images."""
        return None

    @property
    def image_sizes(self) -> np.ndarray:
        """Tokens of each image of all sequences, int64 [images]."""
        return np.zeros(0, dtype=np.int64)

    @property
    def has_targets(self) -> bool:
        """Whether labels are texts of their own (of an encoder-decoder), and not those of the input tokens."""
        return self.labels_are_tokens and self.label_offsets is not self.offsets

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens of each sequence that the model reads, its target's included, int64 [sequences]."""
        return self.lengths + np.diff(self.label_offsets) if self.has_targets else self.lengths

    @property
    def num_label_tokens(self) -> np.ndarray:
        """Label tokens of each sequence that count in the loss, int64 [sequences]."""
        if not self.labels_are_tokens:
            return np.zeros(len(self), dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(self.labels != IGNORE_INDEX)])
        return np.diff(before[self.label_offsets])

    def describe(self, split: str) -> list[str]:
        """Lines on what was cut, what was left out, and labels that look shifted; none if all is well."""
        lines = []
        ways = [
            (self.num_by_marks, "by the chat template's own marks"),
            (self.num_by_prompts, "after its generation prompts"),
            (self.num_by_turns, "turn by turn, in several samples, since it writes history differently"),
        ]
        if found := [f"{number:,} {way}" for number, way in ways if number]:
            lines.append(f"{split}: conversations whose assistant's turns were found: {'; '.join(found)}")
        limit, what = self.length_flags[0], "source" if self.has_targets else "sample"
        if self.num_truncated:
            lines.append(
                f"{split}: {plural(self.num_truncated, what)} cut: longer than {limit} (--truncation), "
                f"by {plural(self.num_tokens_cut, 'token')} in all"
            )
        if self.num_targets_cut:
            lines.append(
                f"{split}: {plural(self.num_targets_cut, 'target')} cut: longer than {self.length_flags[-1]} "
                f"(--truncation), by {plural(self.num_target_tokens_cut, 'token')} in all"
            )
        if self.num_split:
            lines.append(
                f"{split}: {plural(self.num_split, 'sample')} split into {self.num_parts}: longer than {limit} "
                "(--truncation split)"
            )
        if self.num_parts_without_label:
            lines.append(
                f"{split}: {plural(self.num_parts_without_label, 'part')} of split samples left out: no label token"
            )
        if self.num_too_long:
            limits = " or ".join(self.length_flags)
            lines.append(
                f"{split}: {plural(self.num_too_long, 'sample')} left out: longer than {limits} ({self.WHY_NOT_CUT})"
            )
        if self.num_without_label:
            why = self.NO_LABEL.format(within="" if self.has_targets else f" (within {limit})")
            lines.append(f"{split}: {plural(self.num_without_label, 'sample')} left out: {why}")
        if self.num_empty:
            lines.append(
                f"{split}: {plural(self.num_empty, 'sample')} left out: no tokens (empty, or left out by "
                "--skip_bad_rows)"
            )
        if self.num_empty_answers:
            answers = plural(self.num_empty_answers, "empty answer")
            lines.append(f"{split}: {answers} not learned (--learn_empty_answers learns them)")
        if self.num_special_as_text:
            lines.append(special_as_text(split, self.num_special_as_text))
        if self.num_answers_joined:
            lines.append(
                f"{split}: the first token of the answer begins in the prompt in "
                f"{plural(self.num_answers_joined, 'example')}, as white space at a prompt's end does: a server "
                "that is given the prompt alone reads other tokens there; move such white space to the answer's "
                "beginning"
            )
        num_labels = int((self.labels != IGNORE_INDEX).sum())
        if 2 * self.num_misplaced_labels > num_labels:
            lines.append(
                f"{split}: warning: {self.num_misplaced_labels:,} of {num_labels:,} labels are not the token at their "
                "place; labels must not be shifted by the dataset function, each stands where its token does"
            )
        return lines


def special_as_text(split: str, number: int) -> str:
    """The line on examples that spell special tokens."""
    return (
        f"{split}: special tokens of the tokenizer in {plural(number, 'example')} stay text "
        "(--split_special_tokens False makes them tokens)"
    )


def check_token_ids(sequences: Sequences, vocab_size: int, split: str) -> None:
    """Refuse token ids that the model's embedding does not have, before a device-side assert does.

    Raises:
        ConfigError: naming the first row with one.
    """
    wrong_ids = (sequences.input_ids < 0) | (sequences.input_ids >= vocab_size)
    wrong_labels = (sequences.labels >= vocab_size) | ((sequences.labels < 0) & (sequences.labels != IGNORE_INDEX))
    wrong_labels &= sequences.labels_are_tokens
    if (taught := sequences.of_tokens.get(TEACHER_IDS)) is not None and taught.size and taught.max() >= vocab_size:
        raise ConfigError(
            f"dataset ({split}): token id {taught.max()} in column {TEACHER_IDS} is outside the model's vocabulary of "
            f"{vocab_size}; teacher and student need one tokenizer"
        )
    found = []
    for what, values, wrong, offsets in (
        ("token id", sequences.input_ids, wrong_ids, sequences.offsets),
        ("label", sequences.labels, wrong_labels, sequences.label_offsets),
    ):
        if wrong.any():
            position = int(np.argmax(wrong))
            index = int(np.searchsorted(offsets, position, side="right") - 1)
            found.append((int(sequences.source_rows[index]), what, int(values[position])))
    if found:
        row, what, number = min(found, key=lambda one: one[0])  # of one row the token id, from which a label may be
        remedy = "is it another tokenizer's?" if number >= 0 else f"only {IGNORE_INDEX}, for labels, may be below 0"
        raise ConfigError(
            f"dataset ({split}), row {row + 1}: {what} {number} is outside the model's vocabulary of {vocab_size}; "
            f"{remedy}"
        )


def checksum(parts: Iterable[Sequences]) -> int:
    """A number that differs if the sequences differ."""
    value = 0
    for sequences in parts:
        for array in sequences.content:
            value = zlib.crc32(array.tobytes(), value)
    return value
