"""Rows of CSV and TSV files, each as JSON text; every cell is text, and an empty one is null."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from data.json_files import RowText, opened, where_not_utf8

_BLOCK_BYTES = 2**24  # a row must fit into it


def csv_rows(file: Path) -> Iterator[RowText]:
    """The rows of a file whose first line names its columns; TSV if it is called so."""
    bad: list[Any] = []

    def keep_bad(row: Any) -> str:
        bad.append(row)
        return "skip"

    delimiter = "\t" if file.suffix == ".tsv" else ","
    read = csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)  # threads do not number the rows
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=keep_bad)
    try:
        with opened(file) as stream:
            names = csv.open_csv(stream, read, parse, _as_bytes([])).schema.names
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            yield RowText(None, (), f"{file}: names the column {twice[0]} twice")
            return
        bad.clear()
        number = 0
        with opened(file) as stream:
            for batch in csv.open_csv(stream, read, parse, _as_bytes(names)):
                for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    number += 1
                    yield _row(file, number, names, cells)
                for row in bad:
                    yield RowText(
                        None,
                        (),
                        f"{file}, line {row.number}: {row.actual_columns} cells and not {row.expected_columns}",
                    )
                bad.clear()
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        if str(error) != "Empty CSV file":
            yield RowText(None, (), where_not_utf8(file) or f"{file}: {' '.join(str(error).split())[:300]}")


def _as_bytes(names: list[str]) -> csv.ConvertOptions:
    """Cells as bytes, so that one that is no UTF-8 is one bad row; `NA`, `None` and `null` are words."""
    return csv.ConvertOptions(
        column_types={name: pa.binary() for name in names}, null_values=[""], strings_can_be_null=True
    )


def _row(file: Path, number: int, names: list[str], cells: tuple[bytes | None, ...]) -> RowText:
    try:
        row = {name: cell if cell is None else cell.decode() for name, cell in zip(names, cells, strict=True)}
    except UnicodeDecodeError:
        return RowText(None, (), where_not_utf8(file) or f"{file}, row {number}: not UTF-8")
    return RowText(json.dumps(row), names)
