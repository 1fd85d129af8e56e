"""Tokenised examples: what a recipe returned, cut to length and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from data.flat_sequences import FlatRows, flatten
from data.labels import IGNORE_INDEX
from utils.errors import ConfigError

Truncation = Literal["right", "left", "drop", "error"]


@dataclass(frozen=True)
class Examples:
    """Documents end to end in flat arrays: small in memory, and free to share with forked workers.

    Document i is `input_ids[offsets[i]:offsets[i + 1]]`, and the same slice of `labels` (not shifted; the first
    label of a document is never learned, since nothing precedes it).
    """

    input_ids: np.ndarray  # int32 [tokens]
    labels: np.ndarray  # int32 [tokens]
    offsets: np.ndarray  # int64 [documents + 1]
    source_rows: np.ndarray  # int64 [documents]: the row of the data, from 0; messages count from 1
    num_truncated: int = 0
    num_tokens_cut: int = 0
    num_too_long: int = 0  # left out
    num_without_label: int = 0
    num_empty: int = 0

    def __len__(self) -> int:
        return len(self.source_rows)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids and labels of one document, each [length]."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[part], self.labels[part]

    def describe(self, split: str) -> list[str]:
        """What was cut and what was left out, for the start of the run; nothing where all is whole."""
        lines = []
        if self.num_truncated:
            lines.append(
                f"{split}: {self.num_truncated} samples were longer than context_length and were cut (--truncation), "
                f"by {self.num_tokens_cut:,} tokens in all"
            )
        if self.num_too_long:
            lines.append(
                f"{split}: {self.num_too_long} samples left out: longer than context_length (--truncation drop)"
            )
        if self.num_without_label:
            lines.append(
                f"{split}: {self.num_without_label} samples left out: no token to learn (within context_length)"
            )
        if self.num_empty:
            lines.append(f"{split}: {self.num_empty} samples left out: no tokens")
        is_learned = self.labels != IGNORE_INDEX
        num_learned = int(is_learned.sum())
        num_others = int((is_learned & (self.labels != self.input_ids)).sum())
        if 2 * num_others > num_learned:
            lines.append(
                f"{split}: warning: {num_others:,} of {num_learned:,} labels are not the token at their place; labels "
                "are not shifted by the recipe, each stands where its token does"
            )
        return lines


def load_examples(
    recipe: Callable[..., Any],
    dataset_config: Any,
    tokenizer: Any,
    split: str,
    *,
    split_slice: str | None,
    context_length: int,
    truncation: Truncation = "right",
) -> Examples:
    """Run a recipe for one split and check what it returns.

    Raises:
        ConfigError: where the recipe fails, returns nothing, or returns rows that cannot be trained on.
    """
    name = f"{getattr(recipe, '__name__', 'recipe')}, split {split!r}"
    try:
        rows = recipe(dataset_config, tokenizer, split)
        if rows is None:
            raise ConfigError(f"dataset ({name}): the function returned nothing; return a list of tokenised rows")
        if not isinstance(rows, Iterable):
            raise ConfigError(f"dataset ({name}): the function returned {type(rows).__name__}; return a list of rows")
        rows = _take_slice(rows, split_slice)
        return build_examples(rows, name=name, context_length=context_length, truncation=truncation)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the recipe's own code runs here, a generator's while it is read
        raise ConfigError(f"dataset ({name}): {type(error).__name__}: {error}") from error


def _take_slice(rows: Any, split_slice: str | None) -> Any:
    """The first `split_slice` of the rows: "10" rows or "1%" of them (rounded, at least one)."""
    if split_slice is None:
        return rows
    if not hasattr(rows, "__len__"):
        raise ConfigError("--split_slice: needs a dataset with a length; this recipe returns an iterator")
    percentage = split_slice.removesuffix("%")
    count = int(split_slice) if percentage == split_slice else max(1, round(len(rows) * float(percentage) / 100))
    count = min(count, len(rows))
    return rows.select(range(count)) if hasattr(rows, "select") else [rows[i] for i in range(count)]


def build_examples(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str,
    context_length: int,
    truncation: Truncation = "right",
    first_row: int = 0,
    is_part: bool = False,
) -> Examples:
    """Check rows of `input_ids`, `labels` and optional `attention_mask`; cut, count, and leave out what has no label.

    Args:
        truncation: what becomes of a row longer than `context_length`: its first tokens are kept (right), its last
            (left), the row is left out (drop), or the data is refused (error).
        first_row: the first row's place in the data, from 0.
        is_part: whether more rows may follow, so that nothing may be left of these.

    Raises:
        ConfigError: missing columns, columns of unequal length, values that are not integers, a row that is too long
            under `error`, or nothing left.
    """
    flat = flatten(rows, name, first_row)
    if len(flat) == 0 and not is_part:
        raise ConfigError(f"dataset ({name}): it is empty; check the path and the split")
    examples = cut_rows(flat, name=name, context_length=context_length, truncation=truncation, first_row=first_row)
    if len(examples) == 0 and not is_part:
        raise ConfigError(
            f"dataset ({name}): none of its {len(flat)} rows has a token to learn within context_length "
            f"{context_length}; raise --context_length or check the labels"
        )
    return examples


def cut_rows(flat: FlatRows, *, name: str, context_length: int, truncation: Truncation, first_row: int = 0) -> Examples:
    """Rows within `context_length` that have something to learn; the others cut, or left out, and counted.

    Raises:
        ConfigError: for the first row that is too long, under `error`.
    """
    starts, ends = flat.offsets[:-1], flat.offsets[1:]
    lengths = ends - starts
    too_long = lengths > context_length
    if truncation == "error" and too_long.any():
        index = int(np.argmax(too_long))
        raise ConfigError(
            f"dataset ({name}), row {first_row + index + 1}: {lengths[index]} tokens are more than --context_length "
            f"{context_length}; raise it, or give --truncation right, left or drop"
        )
    if truncation == "left":
        starts = np.maximum(starts, ends - context_length)
    else:
        ends = np.minimum(ends, starts + context_length)
    is_empty, is_dropped = lengths == 0, too_long & (truncation == "drop")
    kept = ~is_empty & ~is_dropped
    learned = _learns_anything(flat.labels, starts, ends)
    num_without_label = int((kept & ~learned).sum())
    kept &= learned
    lengths_kept = (ends - starts)[kept]
    num_tokens_cut = int((lengths[kept] - lengths_kept).sum())
    input_ids, labels = flat.input_ids, flat.labels.copy()
    if len(labels) != lengths_kept.sum():
        is_token_kept = _covered(starts[kept], ends[kept], len(labels))
        input_ids, labels = input_ids[is_token_kept], labels[is_token_kept]
    offsets = np.concatenate([[0], np.cumsum(lengths_kept)]).astype(np.int64)
    labels[offsets[:-1]] = IGNORE_INDEX  # a first token follows nothing
    return Examples(
        input_ids=input_ids,
        labels=labels,
        offsets=offsets,
        source_rows=np.flatnonzero(kept) + first_row,
        num_truncated=int(too_long[kept].sum()),
        num_tokens_cut=num_tokens_cut,
        num_too_long=int(is_dropped.sum()),
        num_without_label=num_without_label,
        num_empty=int(is_empty.sum()),
    )


def _learns_anything(labels: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether a row has a label after its first token, bool [rows]; rows are slices of labels and do not overlap."""
    has_second = ends - starts > 1
    found = np.zeros(len(starts), dtype=bool)
    if has_second.any():
        bounds = np.stack([starts[has_second] + 1, ends[has_second]], axis=1).reshape(-1)
        is_learned = np.append(labels != IGNORE_INDEX, False)  # the last row's end must be an index
        found[has_second] = np.logical_or.reduceat(is_learned, bounds)[::2]
    return found


def _covered(starts: np.ndarray, ends: np.ndarray, num_tokens: int) -> np.ndarray:
    """Which tokens are in one of the slices, bool [num_tokens]; slices hold something and do not overlap."""
    steps = np.zeros(num_tokens + 1, dtype=np.int8)
    steps[starts] += 1
    steps[ends] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8).view(bool)


def check_token_ids(examples: Examples, vocab_size: int, split: str) -> None:
    """Refuse token ids that the model's embedding does not have, before a device-side assert does.

    Raises:
        ConfigError: naming the first row at fault.
    """
    wrong = (examples.input_ids < 0) | (examples.input_ids >= vocab_size) | (examples.labels >= vocab_size)
    wrong |= (examples.labels < 0) & (examples.labels != IGNORE_INDEX)
    if wrong.any():
        position = int(np.argmax(wrong))
        document = int(np.searchsorted(examples.offsets, position, side="right") - 1)
        raise ConfigError(
            f"dataset ({split}), row {examples.source_rows[document] + 1}: token id {examples.input_ids[position]} or "
            f"label {examples.labels[position]} is outside the model's vocabulary of {vocab_size}; "
            "is it another tokenizer's?"
        )
