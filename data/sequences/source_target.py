"""Sequences for an encoder-decoder: each has a source and a target of its own length, cut to its own limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np

from data.sequences.causal import Truncation
from data.sequences.flattening import ROWS_AT_A_TIME, holds_whole_numbers, read_column
from data.sequences.token_columns import TOKEN_COLUMNS
from data.sequences.token_lists import whole_numbers, zeros_and_ones
from data.sequences.tokenized import COUNT_COLUMNS, Sequences
from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import BadExample
from utils.errors import ConfigError

LENGTH_FLAGS = ("max_source_length", "max_target_length")


class Affixes(NamedTuple):
    """The special tokens that a tokenizer puts before and after a text. A cut leaves them in place."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class SourceTargetBuilder:
    """Checks and cuts the tokenized rows of a dataset; what `tasks.task.Task.make_reading` gives an encoder-decoder.

    Args:
        max_target_length: tokens of the longest target. The longest source is `context_length`.
    """

    max_target_length: int
    source: Affixes
    target: Affixes

    def __call__(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        name: str,
        context_length: int,
        truncation: Truncation = "right",
        first_row: int = 0,
        is_part: bool = False,
    ) -> Sequences:
        """Sequences of rows of `input_ids`, `labels` and optional `attention_mask` (of the inputs).

        Args: as of `data.sequences.causal.build_sequences`.

        Raises:
            ConfigError: missing columns, values that are not integers, a row that is too long under `error`, or no row
                left.
        """
        sources, targets, counts = read_lists(rows, name, first_row)
        num_rows = len(sources)
        if not num_rows and not is_part:
            raise ConfigError(f"dataset ({name}): it is empty; check the path and the split")
        limits = (context_length, self.max_target_length)
        too_long = [part.lengths > limit for part, limit in zip((sources, targets), limits, strict=True)]
        if truncation == "error" and (either := too_long[0] | too_long[1]).any():
            row = int(np.argmax(either))
            which = 0 if too_long[0][row] else 1
            length = (sources, targets)[which].lengths[row]
            raise ConfigError(
                f"dataset ({name}), row {first_row + row + 1}: {length:,} tokens are more than --{LENGTH_FLAGS[which]} "
                f"{limits[which]}; raise it, or give another --truncation"
            )
        is_empty = sources.lengths == 0
        is_dropped = ~is_empty & (too_long[0] | too_long[1]) & (truncation == "drop")
        has_label = targets.any_of(targets.values != IGNORE_INDEX)
        kept = np.flatnonzero(~is_empty & ~is_dropped & has_label)
        if not len(kept) and not is_part:
            raise ConfigError(
                f"dataset ({name}): none of its {num_rows} rows has a source and a target; check the columns and labels"
            )
        sources, targets = sources.take(kept), targets.take(kept)
        before = [len(sources.values), len(targets.values)]
        sources = sources.cut(limits[0], self.source, truncation)
        targets = targets.cut(limits[1], self.target, truncation)
        return Sequences(
            input_ids=sources.values,
            labels=targets.values,
            offsets=sources.offsets,
            label_offsets=targets.offsets,
            source_rows=first_row + kept,
            num_truncated=int(too_long[0][kept].sum()),
            num_tokens_cut=before[0] - len(sources.values),
            num_targets_cut=int(too_long[1][kept].sum()),
            num_target_tokens_cut=before[1] - len(targets.values),
            num_too_long=int(is_dropped.sum()),
            num_without_label=int((~is_empty & ~is_dropped & ~has_label).sum()),
            num_empty=int(is_empty.sum()),
            length_flags=LENGTH_FLAGS,
            **counts,
        )


@dataclass(frozen=True)
class TokenLists:
    """Lists of token ids end to end."""

    values: np.ndarray  # int32 [tokens]
    lengths: np.ndarray  # int64 [lists]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def any_of(self, holds: np.ndarray) -> np.ndarray:
        """Whether it holds for any token of each list, bool [lists]."""
        before = np.concatenate([[0], np.cumsum(holds)])
        return np.diff(before[self.offsets]) > 0

    def take(self, chosen: np.ndarray) -> TokenLists:
        """The chosen lists, int64 [n] in rising order."""
        if len(chosen) == len(self):
            return self
        is_chosen = np.zeros(len(self), dtype=bool)
        is_chosen[chosen] = True
        return TokenLists(self.values[np.repeat(is_chosen, self.lengths)], self.lengths[chosen])

    def cut(self, limit: int, affixes: Affixes, truncation: Truncation) -> TokenLists:
        """The first tokens of each list that is too long, or the last ones under `left`; special tokens stay."""
        too_long = self.lengths > limit
        if not too_long.any():
            return self
        offsets, kept = self.offsets, []
        for index, length in enumerate(self.lengths.tolist()):
            values = self.values[offsets[index] : offsets[index + 1]]
            if length <= limit:
                kept.append(values)
            elif truncation == "left":
                num_before = num_at_start(values, affixes.before, limit)
                kept += [values[:num_before], values[length - limit + num_before :]]
            else:
                num_after = num_at_start(values[::-1], affixes.after[::-1], limit)
                kept += [values[: limit - num_after], values[length - num_after :]]
        return TokenLists(np.concatenate(kept), np.minimum(self.lengths, limit))


def num_at_start(values: np.ndarray, affix: Sequence[int], limit: int) -> int:
    """The length of the affix, if the values start with it and it leaves room for more."""
    return len(affix) if len(affix) < limit and values[: len(affix)].tolist() == list(affix) else 0


def read_lists(
    rows: Iterable[Mapping[str, Any]], name: str, first_row: int
) -> tuple[TokenLists, TokenLists, dict[str, Any]]:
    """Sources without the tokens that are masked out, targets, and the sums of the columns of counts."""
    if isinstance(rows, datasets.Dataset) and (found := _read_columns(rows)) is not None:
        return found
    sources, targets, counts = [], [], dict.fromkeys(COUNT_COLUMNS, 0)
    for index, row in enumerate(rows, first_row):
        try:
            source, target = _read_row(row)
        except BadExample as error:
            raise ConfigError(f"dataset ({name}), row {index + 1}: {error}") from error
        sources.append(source)
        targets.append(target)
        for column in COUNT_COLUMNS:
            counts[column] += row.get(column, 0)
    return _end_to_end(sources), _end_to_end(targets), counts


def _read_columns(dataset: datasets.Dataset) -> tuple[TokenLists, TokenLists, dict[str, Any]] | None:
    """The same from Arrow's buffers, with no Python object per row; None if rows have to be read one by one."""
    there = dataset.format["columns"]
    names = ["input_ids", "labels"]
    others = {"attention_mask", *TOKEN_COLUMNS} & {*there}
    if dataset.format["type"] == "custom" or not set(names) <= set(there) or others:
        return None
    if not all(holds_whole_numbers(dataset.data.schema.field(name).type) for name in names):
        return None
    counted = [name for name in COUNT_COLUMNS if name in there]
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in names}
    counts = dict.fromkeys(counted, 0)
    for table in dataset.select_columns([*names, *counted]).with_format("arrow").iter(ROWS_AT_A_TIME):
        for name in names:
            if (column := read_column(table[name])) is None:
                return None
            parts[name].append(column)
        for name in counted:
            counts[name] += int(table[name].to_numpy().sum())
    sources, targets = (
        TokenLists(
            np.concatenate([np.empty(0, np.int32), *(values for values, _ in parts[name])]),
            np.concatenate([np.empty(0, np.int64), *(lengths for _, lengths in parts[name])]),
        )
        for name in names
    )
    return sources, targets, counts


def _read_row(row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(row, Mapping) or "input_ids" not in row or "labels" not in row:
        found = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise BadExample(f"needs input_ids and labels (the tokens of source and target), found {found}")
    if (name := next((name for name in TOKEN_COLUMNS if row.get(name) is not None), None)) is not None:
        raise BadExample(f"column {name} is for causal language models that learn tokens; leave it out")
    source, target = whole_numbers("input_ids", row["input_ids"]), whole_numbers("labels", row["labels"])
    mask = row.get("attention_mask")
    kept = np.ones(source.shape, dtype=bool) if mask is None else zeros_and_ones("attention_mask", mask)
    if len(source) != len(kept):
        raise BadExample(f"input_ids and attention_mask must have one length; found {len(source)} and {len(kept)}")
    return source[kept], target


def _end_to_end(lists: list[np.ndarray]) -> TokenLists:
    lengths = np.array([len(values) for values in lists], dtype=np.int64)
    return TokenLists(np.concatenate([np.empty(0, np.int32), *lists]), lengths)
