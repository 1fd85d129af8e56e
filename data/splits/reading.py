"""Reads one split of a dataset, from files, a saved dataset or the hub, and keeps the rows that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from configs.datasets import DataSource
from data.files.csv_grammar import Quoting
from data.files.first_keys import first_without
from data.files.joined_columns import JoinedColumns
from data.files.kinds import TABLES
from data.files.row_files import FILE, NEW_KEYS, PROBLEM, ROW, keys_of
from data.files.row_stream import RowStream
from data.files.stored_rows import store_rows
from data.splits.data_path import Place, locate
from data.splits.examples import REMEDY, SplitExamples
from data.splits.files import Files, unread_lists
from data.splits.files_taken import say_files
from data.splits.known_columns import columns_there
from data.splits.learned_columns import learned_columns
from data.splits.opening import errors_in_one_line, no_rows, open_rows, refuse_empty
from data.splits.stored_values import as_written
from data.splits.validation_share import chosen_rows, sets_rows_aside, validation_fraction
from utils.errors import ConfigError
from utils.printing import print_line
from utils.progress import shows_progress


def load_split(
    flag: str,
    dataset_config: DataSource,
    split: str,
    split_slice: str | None = None,
    *,
    text_columns: Sequence[str] = (),
    other_columns: Sequence[str] = (),
    hub_name: str | None = None,
    kinds: Sequence[str] = TABLES,
    **reader_options: Any,
) -> SplitExamples:
    """The examples of one split, with the columns that a dataset function needs.

    Args:
        flag: the dataset's name on the command line, for messages.
        split_slice: keep these of the split's examples, see `first_rows`; a stream is kept whole.
        text_columns: required columns, which must hold text.
        other_columns: optional columns.
        hub_name: the dataset to read if `data_path` is unset.
        kinds: suffixes of the files that can be read.
        reader_options: passed to their reader.

    Raises:
        ConfigError: naming the place and its error.
    """
    is_training = split == dataset_config.train_split
    place = locate(flag, dataset_config, hub_name, kinds)
    has_fraction = validation_fraction(flag, dataset_config) > 0
    takes_fraction = has_fraction and not is_training and not place.has_split(split)
    split_read = dataset_config.train_split if takes_fraction else split
    files = place.files_of(split_read) if isinstance(place, Files) else []
    name_of_place = str(files[0]) if len(files) == 1 and not takes_fraction else str(place)
    name = f"--{flag}.data_path: {name_of_place}"
    streams = dataset_config.streaming and is_training
    if isinstance(place, Files) and is_training and shows_progress():
        for line in filter(None, (place.note, *unread_lists(place))):
            print_line(f"--{flag}.data_path: {line}")
    quoting = _quoting(flag, dataset_config, files)
    data = open_rows(name, place, split_read, streams=streams, quoting=quoting, **reader_options)
    all_columns, row_numbers = column_names(data), None
    if isinstance(data, RowStream) and not all_columns and isinstance(first := next(iter(data), None), str):
        raise ConfigError(f"--{flag}.data_path: {first}; {REMEDY}")
    num_rows: Sequence[int] | None = None
    if holds_text(data):
        num_rows = _rows_by_file(data, files)
        data, row_numbers = _without_problems(data, f"--{flag}.data_path", dataset_config.skip_bad_rows)
    if not isinstance(data, RowStream) and not streams and not len(data):
        raise no_rows(name)
    weight = dataset_config.weight_column
    if weight is not None and not streams and weight not in all_columns:
        there = columns_there(tuple(all_columns), flag)
        raise ConfigError(f"--{flag}.weight_column: {name_of_place} has no column {weight!r}; it has {there}")
    asked = (*text_columns, *other_columns, *([weight] if weight is not None else []))
    absent = data.absent() if isinstance(data, RowStream) else first_without(files, quoting)
    _check_columns(name, flag, dataset_config, all_columns, text_columns, () if streams else other_columns)
    learned = tuple(dict.fromkeys(name for name in learned_columns(all_columns) if name not in asked))
    columns = [column for column in all_columns if column in (*asked, *learned)]
    if isinstance(data, RowStream) and data.joined is not None:
        _check_joined(data.joined, flag, columns)
    if isinstance(data, RowStream):
        data, num_rows = _read(name, place, data, columns, streams=streams)
    else:
        data = data.select_columns([ROW, PROBLEM] if holds_text(data) else columns)
    if split_read == split:
        say_files(flag, split, files, num_rows)
    if takes_fraction or (is_training and not streams and sets_rows_aside(flag, dataset_config, place)):
        chosen = chosen_rows(name, flag, dataset_config, len(data), aside=takes_fraction)
        data = data.select(chosen)
        row_numbers = chosen if row_numbers is None else row_numbers[chosen]
    if not streams:
        data = first_rows(data, split_slice)
    return SplitExamples(
        data=data,
        flag=f"--{flag}.data_path",
        place=name_of_place,
        columns=tuple(columns),
        all_columns=tuple(all_columns),
        text_columns=tuple(text_columns),
        learns_empty_answers=dataset_config.learn_empty_answers,
        splits_special_tokens=dataset_config.split_special_tokens,
        masks_prompts=getattr(dataset_config, "mask_prompt", True),
        row_numbers=row_numbers,
        rows_by_file=() if streams or num_rows is None else tuple(zip(map(str, files), num_rows, strict=True)),
        later_columns=tuple(
            name for name in dict.fromkeys((*asked, *learned)) if streams and name not in (*columns, *text_columns)
        ),
        learned_columns=learned,
        weight_column=weight,
        absent=absent,
        as_written=as_written(data),
        skips_bad_rows=dataset_config.skip_bad_rows,
        is_training=is_training,
    )


def _quoting(flag: str, config: DataSource, files: Sequence[Path]) -> Quoting:
    """The quoting of CSV and TSV files.

    Raises:
        ConfigError: if it was given and the files are others.
    """
    if config.quoting != type(config).quoting and not (files and files[0].suffix in (".csv", ".tsv")):
        raise ConfigError(f"--{flag}.quoting: is of .csv and .tsv files, and these are others; leave it out")
    return config.quoting


def _check_columns(
    name: str, flag: str, config: DataSource, there: Sequence[str], required: Sequence[str], optional: Sequence[str]
) -> None:
    """Refuse data without a required column, or without an optional one that the user named."""
    named = {getattr(config, field.name): field for field in fields(config) if field.name.endswith("_column")}
    asked = [column for column in optional if column in named and column != named[column].default]
    missing = [column for column in (*required, *asked) if column not in there]
    if missing:
        flags = " and ".join(f"--{flag}.{named[column].name}" for column in missing if column in named)
        remedy = f"; name the right one with {flags}" if flags else ""
        raise ConfigError(f"{name} has no column {', '.join(missing)}; it has {columns_there(there, flag)}{remedy}")


def _check_joined(joined: JoinedColumns, flag: str, columns: Sequence[str]) -> None:
    """Refuse Parquet and Arrow files with types that cannot be joined in columns that are read."""
    if refusal := next((joined.refusals[column] for column in columns if column in joined.refusals), None):
        raise ConfigError(f"--{flag}.data_path: {refusal}")


def _rows_by_file(data: Any, files: Sequence[Path]) -> list[int]:
    """The number of rows of each file of a stored dataset."""
    counts = np.bincount(data.data.column(FILE).to_numpy(), minlength=len(files))
    return [int(count) for count in counts]


def _read(
    name: str, place: Place, rows: RowStream, columns: Sequence[str], *, streams: bool
) -> tuple[Any, Sequence[int] | None]:
    """The rows with these columns, stored unless they are streamed; and the number of each file's, if it is known.

    Raises:
        ConfigError: if there are none, or they cannot be read.
    """
    one = list(rows.features or ())[:1]  # whoever finds no column to use will say which are there
    rows = rows.select_columns(columns or one)
    with errors_in_one_line(name, place):
        if streams:
            refuse_empty(name, rows)
            return rows, rows.joined.num_rows if rows.joined is not None else None
        data = store_rows(rows)
        if not len(data):
            raise no_rows(name)
        return data.select_columns(list(columns)), _rows_by_file(data, rows.files)


def holds_text(data: Any) -> bool:
    """Whether a dataset has its rows as text."""
    return isinstance(data, datasets.Dataset) and set(data.column_names) >= {ROW, PROBLEM}


def _without_problems(data: Any, flag: str, skips: bool) -> tuple[Any, np.ndarray | None]:
    """The rows that can be read, and their numbers; None if these are all.

    Raises:
        ConfigError: if some cannot, unless they are skipped.
    """
    problems = data.data.column(PROBLEM)
    num_bad = len(problems) - problems.null_count
    if not num_bad:
        return data, None
    good = pc.is_null(problems).to_numpy()
    first = problems[int(np.argmin(good))].as_py()
    if not skips:
        more = f" ({num_bad - 1:,} more rows cannot be read)" if num_bad > 1 else ""
        raise ConfigError(f"{flag}: {first}{more}; {REMEDY}")
    if shows_progress():
        print_line(f"{flag}: {num_bad:,} of {len(good):,} rows cannot be read and are left out; the first: {first}")
    numbers = np.flatnonzero(good)
    return data.select(numbers), numbers


def first_rows(rows: Any, split_slice: str | None) -> Any:
    """The first `split_slice` of the rows: "10" rows or "1%" of them (rounded, at least one); None keeps all.

    Raises:
        ConfigError: if the rows have no length.
    """
    if split_slice is None:
        return rows
    if not hasattr(rows, "__len__"):
        raise ConfigError("--split_slice: needs a dataset with a length; this dataset function returns an iterator")
    percentage = split_slice.removesuffix("%")
    count = int(split_slice) if percentage == split_slice else max(1, round(len(rows) * float(percentage) / 100))
    count = min(count, len(rows))
    return rows.select(range(count)) if hasattr(rows, "select") else [rows[i] for i in range(count)]


def column_names(data: Any) -> list[str]:
    """The columns of a dataset, or the keys of its rows; if a stream does not name them, those of its first rows."""
    if isinstance(data, RowStream):
        return data.column_names()
    if holds_text(data):
        return keys_of(pc.drop_null(data.data.column(NEW_KEYS)).to_pylist())
    return list(data.column_names or next(iter(data), {}))
