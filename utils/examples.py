"""Tokenised examples: what a recipe returned, checked, cut to length and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.errors import ConfigError
from utils.labels import IGNORE_INDEX

LIMITS = np.iinfo(np.int32)


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
        """What was kept and what was left out, for the start of the run."""
        lines = [
            f"{split}: {len(self)} samples, {len(self.input_ids):,} tokens, "
            f"{int((self.labels != IGNORE_INDEX).sum()):,} of them learned"
        ]
        if self.num_truncated:
            lines.append(
                f"{split}: {self.num_truncated} samples were longer than context_length and lost their last "
                f"{self.num_tokens_cut:,} tokens in all"
            )
        if self.num_without_label:
            lines.append(
                f"{split}: {self.num_without_label} samples left out: no token to learn (within context_length)"
            )
        if self.num_empty:
            lines.append(f"{split}: {self.num_empty} samples left out: no tokens")
        return lines


def load_examples(
    recipe: Callable[..., Any],
    dataset_config: Any,
    tokenizer: Any,
    split: str,
    *,
    split_slice: str | None,
    context_length: int,
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
        return build_examples(_take_slice(rows, split_slice), name=name, context_length=context_length)
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
    rows: Iterable[Mapping[str, Any]], *, name: str, context_length: int, first_row: int = 0, is_part: bool = False
) -> Examples:
    """Check rows of `input_ids`, `labels` and optional `attention_mask`; cut, count, and leave out what has no label.

    Args:
        first_row: the first row's place in the data, from 0.
        is_part: whether more rows may follow, so that nothing may be left of these.

    Raises:
        ConfigError: missing columns, columns of unequal length, values that are not integers, or nothing left.
    """
    input_ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    source_rows: list[int] = []
    num_truncated = num_tokens_cut = num_without_label = num_empty = num_rows = 0
    for index, row in enumerate(rows, first_row):
        num_rows += 1
        ids, targets = _read_row(row, f"dataset ({name}), row {index + 1}")
        if len(ids) == 0:
            num_empty += 1
            continue
        was_cut = len(ids) > context_length
        num_cut_here = max(0, len(ids) - context_length)
        ids, targets = ids[:context_length], targets[:context_length].copy()
        targets[0] = IGNORE_INDEX
        if not (targets != IGNORE_INDEX).any():
            num_without_label += 1
            continue
        num_truncated += was_cut
        num_tokens_cut += num_cut_here
        input_ids.append(ids)
        labels.append(targets)
        source_rows.append(index)
    if num_rows == 0 and not is_part:
        raise ConfigError(f"dataset ({name}): it is empty; check the path and the split")
    if not input_ids and not is_part:
        raise ConfigError(
            f"dataset ({name}): none of its {num_rows} rows has a token to learn within context_length "
            f"{context_length}; raise --context_length or check the labels"
        )
    return Examples(
        input_ids=np.concatenate([np.empty(0, dtype=np.int32), *input_ids]),
        labels=np.concatenate([np.empty(0, dtype=np.int32), *labels]),
        offsets=np.concatenate([[0], np.cumsum([len(ids) for ids in input_ids])]).astype(np.int64),
        source_rows=np.array(source_rows, dtype=np.int64),
        num_truncated=num_truncated,
        num_tokens_cut=num_tokens_cut,
        num_without_label=num_without_label,
        num_empty=num_empty,
    )


def _read_row(row: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(row, Mapping) or "input_ids" not in row or "labels" not in row:
        found = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise ConfigError(f"{where}: needs input_ids and labels (tokenised, labels not shifted), found {found}")
    ids, targets = _whole_numbers(row["input_ids"], where), _whole_numbers(row["labels"], where)
    mask = row.get("attention_mask")
    kept = np.ones(ids.shape, dtype=bool) if mask is None else np.asarray(mask).astype(bool)
    if not ids.shape == targets.shape == kept.shape or ids.ndim != 1:
        raise ConfigError(
            f"{where}: input_ids, labels and attention_mask must have one length; "
            f"found {ids.shape}, {targets.shape} and {kept.shape}"
        )
    return ids[kept], targets[kept]


def _whole_numbers(values: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(1, dtype=object)  # lists of unequal lengths
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(f"{where}: input_ids and labels must be lists of whole numbers, found {array.dtype}")
    if array.size and (array.min() < LIMITS.min or array.max() > LIMITS.max):
        raise ConfigError(f"{where}: {array.max()} is no token id; is it another tokenizer's?")
    return array.astype(np.int32)


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
