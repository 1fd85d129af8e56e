"""Flat arrays from whatever rows a dataset function returned, for causal data: labels as long as their inputs.

A row is one sequence, or several end to end if it has `sample_lengths` (a conversation may give several). Sequences
keep the number of their row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from data.sequences.prepared_rows import is_prepared, plain_row
from data.sequences.token_columns import (
    SAMPLE_WEIGHT,
    TEACHER,
    WEIGHTS,
    TokenArrays,
    check_probabilities,
    end_to_end,
    token_arrays,
)
from data.sequences.token_lists import LIMITS, whole_numbers, zeros_and_ones
from data.sequences.tokenized import COUNT_COLUMNS, Sequences
from data.tokens.spans import BadExample
from utils.errors import ConfigError

ROWS_AT_A_TIME = 20_000  # of an Arrow table: bounds host memory in addition to the flat arrays


def flatten(rows: Iterable[Mapping[str, Any]], name: str, first_row: int = 0) -> Sequences:
    """Rows of `input_ids`, `labels` and optional `attention_mask` as sequences, without the tokens that are masked out.

    A Hugging Face dataset without errors is read column by column; anything else, row by row.

    Args:
        first_row: the first row's place in the data, from 0.

    Raises:
        ConfigError: for the first row with columns that are missing, of unequal length or not of whole numbers.
    """
    if isinstance(rows, datasets.Dataset):
        flat = flatten_columns(rows, first_row)
        if flat is not None:
            return flat
    input_ids, labels, more = list[np.ndarray](), list[np.ndarray](), list[TokenArrays]()
    lengths, numbers, counts = list[int](), list[int](), dict.fromkeys(COUNT_COLUMNS, 0)
    for index, row in enumerate(rows, first_row):
        try:
            ids, targets, samples, arrays = _read_row(row)
            end_to_end([*more[:1], arrays], [len(part) for part in (*input_ids[:1], ids)])
        except BadExample as error:
            raise ConfigError(f"dataset ({name}), row {index + 1}: {error}") from error
        more.append(arrays)
        input_ids.append(ids)
        labels.append(targets)
        lengths.extend(samples)
        numbers.append(len(samples))
        for column in COUNT_COLUMNS:
            counts[column] += row.get(column, 0)
    sizes = [np.array(lengths, dtype=np.int64)], [np.array(numbers, dtype=np.int64)]
    return _end_to_end(input_ids, labels, *sizes, first_row, counts, more)


def flatten_columns(dataset: datasets.Dataset, first_row: int = 0) -> Sequences | None:
    """Sequences from Arrow's buffers, with no Python object per row; None if a row is wrong or made by a transform."""
    names = [name for name in ("input_ids", "labels", "attention_mask") if name in dataset.format["columns"]]
    if dataset.format["type"] == "custom" or names[:2] != ["input_ids", "labels"] or is_prepared(dataset.column_names):
        return None  # a user's transform makes the rows when they are read, or a column is missing
    if {WEIGHTS, *TEACHER} & {*dataset.format["columns"]}:
        return None  # numbers with a fraction, or lists of lists
    weighs = [name for name in (SAMPLE_WEIGHT,) if name in dataset.format["columns"]]
    if not all(holds_whole_numbers(dataset.data.schema.field(name).type) for name in names):
        return None
    counted = [name for name in COUNT_COLUMNS if name in dataset.format["columns"]]
    several = [name for name in ("sample_lengths",) if name in dataset.format["columns"]]
    input_ids, labels, lengths, numbers, counts = [], [], [], [], dict.fromkeys(counted, 0)
    more: list[TokenArrays] = []
    for table in (
        dataset.select_columns([*names, *counted, *several, *weighs]).with_format("arrow").iter(ROWS_AT_A_TIME)
    ):
        columns = [read_column(table[name]) for name in names]
        first = columns[0]
        if first is None:
            return None
        values = []
        for column in columns:
            if column is None or not np.array_equal(column[1], first[1]):
                return None
            values.append(column[0])
        num_tokens = first[1]
        if len(names) == 3:
            mask = values.pop()
            kept = mask == 1
            if not np.array_equal(kept, mask):
                return None
            values = [column[kept] for column in values]
            num_tokens = np.diff(np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], np.cumsum(first[1])])])
        input_ids.append(values[0])
        labels.append(values[1])
        samples = num_tokens, np.ones(len(num_tokens), dtype=np.int64)
        if several:
            found = read_column(table["sample_lengths"])
            if found is None or (found[0] < 0).any() or not _add_up(*found, num_tokens):
                return None
            samples = found
        if weighs:
            weights = table[SAMPLE_WEIGHT].to_numpy().astype(np.float32)
            if not np.isfinite(weights).all() or (weights < 0).any():
                return None
            more.append({WEIGHTS: np.repeat(weights, num_tokens)})
        lengths.append(samples[0])
        numbers.append(samples[1])
        for name in counted:
            counts[name] += int(table[name].to_numpy().sum())
    return _end_to_end(input_ids, labels, lengths, numbers, first_row, counts, more)


def _add_up(lengths: np.ndarray, numbers: np.ndarray, num_tokens: np.ndarray) -> bool:
    """Whether each row's sequences have as many tokens as the row."""
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.array_equal(np.diff(before[np.concatenate([[0], np.cumsum(numbers)])]), num_tokens)


def _end_to_end(
    input_ids: list[np.ndarray],
    labels: list[np.ndarray],
    lengths: list[np.ndarray],
    numbers: list[np.ndarray],
    first_row: int,
    counts: Mapping[str, Any],
    more: Sequence[TokenArrays],
) -> Sequences:
    """Parts, of which there may be none, as one; a label for every token.

    Args:
        lengths: tokens of each sequence.
        numbers: sequences of each row.
        more: other arrays of the same parts; none at all if no part has one.
    """
    none = np.empty(0, dtype=np.int32)
    num_of_row = np.concatenate([*numbers, none]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, none]))]).astype(np.int64)
    return Sequences(
        input_ids=np.concatenate([*input_ids, none]),
        labels=np.concatenate([*labels, none]),
        offsets=offsets,
        label_offsets=offsets,
        source_rows=np.repeat(np.arange(first_row, first_row + len(num_of_row)), num_of_row),
        of_tokens=end_to_end(more, [len(ids) for ids in input_ids]) if more else {},
        **counts,
    )


def holds_whole_numbers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type) and not pa.types.is_uint64(kind.value_type)


def read_column(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray] | None:
    """Values, int32 [tokens], and their number in each row, int64 [rows]; None for a null or a number out of range."""
    array = column.combine_chunks().cast(pa.large_list(pa.int64()))
    values = array.flatten()
    if array.null_count or values.null_count:
        return None
    numbers = values.to_numpy()
    if len(numbers) and (numbers.min() < LIMITS.min or numbers.max() > LIMITS.max):
        return None
    return numbers.astype(np.int32), np.diff(array.offsets.to_numpy())


def _read_row(row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, list[int], TokenArrays]:
    if not isinstance(row, Mapping) or "input_ids" not in row or "labels" not in row:
        found = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise BadExample(f"needs input_ids and labels (tokenized, labels not shifted), found {found}")
    row = plain_row(row)
    ids, targets = whole_numbers("input_ids", row["input_ids"]), whole_numbers("labels", row["labels"])
    mask = row.get("attention_mask")
    kept = None if mask is None else zeros_and_ones("attention_mask", mask)
    num_of_mask = len(ids) if kept is None else len(kept)
    if not len(ids) == len(targets) == num_of_mask:
        raise BadExample(
            f"input_ids, labels and attention_mask must have one length; found {len(ids)}, {len(targets)} and "
            f"{num_of_mask}"
        )
    arrays = token_arrays(row, len(ids))
    if kept is not None:
        ids, targets = ids[kept], targets[kept]
        arrays = {name: values[kept] for name, values in arrays.items()}
    if row.get("sample_lengths") is None:
        check_probabilities(arrays, targets, [len(ids)])
        return ids, targets, [len(ids)], arrays
    lengths = whole_numbers("sample_lengths", row["sample_lengths"])
    if lengths.sum(dtype=np.int64) != len(ids) or (lengths < 0).any():
        raise BadExample(f"sample_lengths add up to {lengths.sum()}, and the row has {len(ids)} tokens")
    check_probabilities(arrays, targets, lengths.tolist())
    return ids, targets, lengths.tolist(), arrays
