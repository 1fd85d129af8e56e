"""Sequences of labeled texts: cut to their limit, with the label that each was written with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from data.sequences.causal import Truncation
from data.sequences.source_target import TokenLists, num_at_start, read_lists
from data.sequences.tokenized import COUNT_COLUMNS, Sequences
from data.tokens.labeled_texts import PairAffixes, fault_of_label, written_label
from utils.errors import ConfigError


@dataclass(frozen=True)
class LabeledBuilder:
    """Checks and cuts the tokenized rows of a dataset; what `tasks.task.Task.make_reading` gives to classification.

    A cut takes tokens from the end of a text, under `left` from its beginning, and of a pair from the longer text
    first, as transformers' `longest_first` does. Special tokens stay.
    """

    around: PairAffixes

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
        """Sequences of rows of `input_ids` and `labels` as `data.tokens.labeled_texts` makes them, or `label`.

        Args: as of `data.sequences.causal.build_sequences`.

        Raises:
            ConfigError: missing columns, values that are not integers, a row that is too long under `error`, or no row
                left.
        """
        texts, labels, counts = read_lists(_with_written_labels(rows, name, first_row), name, first_row)
        num_rows = len(texts)
        if not num_rows and not is_part:
            raise ConfigError(f"dataset ({name}): it is empty; check the path and the split")
        too_long = texts.lengths > context_length
        if truncation == "error" and too_long.any():
            row = int(np.argmax(too_long))
            raise ConfigError(
                f"dataset ({name}), row {first_row + row + 1}: {texts.lengths[row]:,} tokens are more than "
                f"--context_length {context_length}; raise it, or give another --truncation"
            )
        is_empty, is_dropped = texts.lengths == 0, too_long & (truncation == "drop")
        kept = np.flatnonzero(~is_empty & ~is_dropped)
        if not len(kept) and not is_part:
            raise ConfigError(f"dataset ({name}): none of its {num_rows} rows has a text; check the columns")
        texts, labels = texts.take(kept), labels.take(kept)
        num_before = len(texts.values)
        texts, labels = self._cut(texts, labels, context_length, left=truncation == "left")
        counts = {**counts, "num_answers_joined": 0, "num_empty_answers": 0}
        return Sequences(
            input_ids=texts.values,
            labels=labels.values,
            offsets=texts.offsets,
            label_offsets=labels.offsets,
            source_rows=first_row + kept,
            labels_are_tokens=False,
            num_truncated=int(too_long[kept].sum()),
            num_tokens_cut=num_before - len(texts.values),
            num_too_long=int(is_dropped.sum()),
            num_empty=int(is_empty.sum()),
            **counts,
        )

    def _cut(self, texts: TokenLists, labels: TokenLists, limit: int, *, left: bool) -> tuple[TokenLists, TokenLists]:
        offsets, label_offsets = texts.offsets, labels.offsets
        if not (texts.lengths > limit).any():
            return texts, labels
        written, kept = labels.values.copy(), []
        for index, length in enumerate(texts.lengths.tolist()):
            ids = texts.values[offsets[index] : offsets[index + 1]]
            if length > limit:
                num_first = int(written[label_offsets[index]])
                ids, written[label_offsets[index]] = self._cut_one(ids, num_first, limit, left=left)
            kept.append(ids)
        return TokenLists(np.concatenate(kept), np.minimum(texts.lengths, limit)), TokenLists(written, labels.lengths)

    def _cut_one(self, ids: np.ndarray, num_first: int, limit: int, *, left: bool) -> tuple[np.ndarray, int]:
        """The tokens that stay, and how many of them are of the first text."""
        around, is_pair = self.around, num_first < len(ids)
        before = num_at_start(ids, around.before, limit)
        between = num_at_start(ids[:num_first][::-1], around.between[::-1], limit) if is_pair else 0
        after = num_at_start(ids[::-1], around.after[::-1], limit)
        first = slice(before, num_first - between if is_pair else len(ids) - after)
        second = slice(num_first, len(ids) - after) if is_pair else slice(0, 0)
        lengths = [first.stop - first.start, second.stop - second.start]
        room = limit - before - between - after
        shorter = min(min(lengths), room // 2) if is_pair else 0
        keep = [shorter, room - shorter] if lengths[0] < lengths[1] else [room - shorter, shorter]
        parts = [_part(ids[place], number, left=left) for place, number in zip((first, second), keep, strict=True)]
        glue = ids[num_first - between : num_first] if is_pair else ids[:0]
        start = np.concatenate([ids[:before], parts[0], glue])
        rest = np.concatenate([parts[1], ids[len(ids) - after :]])
        return np.concatenate([start, rest]), len(start) if is_pair else limit


def _part(ids: np.ndarray, number: int, *, left: bool) -> np.ndarray:
    return ids[len(ids) - number :] if left else ids[:number]


def _with_written_labels(rows: Iterable[Mapping[str, Any]], name: str, first_row: int) -> Iterable[Mapping[str, Any]]:
    """The rows, those of a user with their `label` as the project's own tokenizing writes it."""
    if isinstance(rows, datasets.Dataset) and COUNT_COLUMNS[0] in rows.column_names:
        return rows
    return _written(rows, name, first_row)


def _written(rows: Iterable[Mapping[str, Any]], name: str, first_row: int) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows, first_row + 1):
        if isinstance(row, Mapping) and "input_ids" in row:
            if "label" not in row:
                raise ConfigError(f"dataset ({name}), row {number}: it has no label; give input_ids and label")
            label = _plain(row["label"])
            if fault := fault_of_label(label):
                raise ConfigError(f"dataset ({name}), row {number}: label {fault}")
            num_tokens = int(np.sum(row["attention_mask"])) if "attention_mask" in row else len(row["input_ids"])
            row = {**row, "labels": np.concatenate([[num_tokens], written_label(label)]).astype(np.int32)}
        yield row


def _plain(value: Any) -> Any:
    """A value of NumPy or torch as Python's own, in a list, too."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value
