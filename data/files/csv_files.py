"""Rows of CSV and TSV files, each as JSON text; every cell is text, and an empty one is null.

Spreadsheets of countries that write 1,5 put semicolons between cells, and some programs tabs: a .csv file whose first
line has no comma outside of quotes is read so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from data.files.byte_chunks import ByteChunks, end_of_lines
from data.files.json_files import RowText, where_not_utf8
from data.files.row_chunks import ItemChunk, Place, RowChunk, RowReader

_MOST_BYTES = 2**24  # of a row


def csv_rows(file: Path) -> Iterator[RowText]:
    """The rows of a file whose first line names its columns; TSV if it is called so."""
    reader = CsvReader(file)
    place: Place = (0, 0)
    while (chunk := reader.chunk(*place)) is not None:
        for row in chunk.read(0, len(chunk)):
            yield RowText(None, None, row) if isinstance(row, str) else RowText(json.dumps(row), row)
        place = chunk.next
    reader.close()


def _delimiter(file: Path) -> str:
    if file.suffix == ".tsv":
        return "\t"
    with file.open("rb") as stream:
        names = re.sub(rb'"[^"]*"', b"", stream.readline(_MOST_BYTES))
    return next((delimiter for delimiter in ",\t;" if delimiter.encode() in names), ",")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class CsvReader(RowReader):
    """The rows of such a file from any row on: a row's end is a line's end outside of quotes."""

    def __init__(self, file: Path) -> None:
        self.file, self.delimiter = file, _delimiter(file)
        # A field that begins with a quote ends after the next one that is not doubled; one cut in between is no field.
        field = rb'(?:"[^"]*+(?:""[^"]*+)*+"|(?!"))[^%b\r\n]*+' % self.delimiter.encode()
        self._row = re.compile(rb"(?:%b%b)*+%b(?:\r\n|\n|\r)" % (field, self.delimiter.encode(), field))
        self._bytes = ByteChunks(file, self._end_of_rows, most=_MOST_BYTES)
        self._names: list[str] = []

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        data = self._bytes.at(position)
        if not data:
            return None
        if unclosed := self._unclosed(data, position):
            if unclosed == data:
                num_lines = len(data.splitlines())
                problem = f"{self.file}, line {num_before + 1}: a quote is not closed"
                problem += f", so the {num_lines - 1:,} lines after it are not read" if num_lines > 1 else ""
                return ItemChunk([problem], (position + len(data), num_before + 1))
            data = data.removesuffix(unclosed)
        following = (position + len(data), num_before)
        if len(data) > _MOST_BYTES and not self._end_of_rows(data):
            problem = f"{self.file}, row {num_before + 1}: longer than {_MOST_BYTES >> 20} MiB; is a quote not closed?"
            return ItemChunk([problem], (self.file.stat().st_size, num_before + 1))
        try:
            self._names = self._names or self._read_names()
            if twice := [name for name, count in Counter(self._names).items() if count > 1]:
                problem = f"{self.file}: names the column {twice[0]} twice"
                return ItemChunk([problem], (self.file.stat().st_size, 0))
            bad: list[Any] = []

            def keep_bad(row: Any) -> str:
                bad.append(row)
                return "skip"

            # Arrow decodes a bad row for the handler, and prints a traceback if it cannot.
            handler = keep_bad if _is_utf8(data) else None
            table = csv.read_csv(pa.BufferReader(data), **self._options(self._names, handler, has_header=not position))
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            if str(error) == "Empty CSV file":
                return ItemChunk([], following)
            problem = where_not_utf8(self.file) or f"{self.file}: {' '.join(str(error).split())[:300]}"
            return ItemChunk([problem], (self.file.stat().st_size, 0))
        first_line = num_before if position else 0  # without a header, a chunk's own lines count from 1
        problems = [
            f"{self.file}, line {first_line + row.number}: {row.actual_columns} cells and not {row.expected_columns}"
            for row in bad
        ]
        num_lines = table.num_rows + len(bad) + (not position)
        return CsvChunk(self.file, num_before, table, problems, (following[0], num_before + num_lines))

    def _unclosed(self, data: bytes, position: int) -> bytes:
        """The end of the file, from the row on whose last quote is not closed; b"" if there is none in this chunk."""
        if b'"' not in data or position + len(data) < self.file.stat().st_size:
            return b""
        rest = data[self._end_of_rows(data) :]
        return b"" if self._row.fullmatch(rest + b"\n") else rest

    def close(self) -> None:
        self._bytes.close()

    def names(self) -> list[str]:
        """The columns; none if the first row cannot be read."""
        try:
            return self._read_names()
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return []

    def _read_names(self) -> list[str]:
        """From the first row, whichever chunk was asked for."""
        first = ByteChunks(self.file, self._end_of_rows, most=_MOST_BYTES)
        data = first.at(0).lstrip(b"\r\n")
        first.close()
        if row := self._row.match(data):  # alone: arrow prints a traceback for later rows that are no UTF-8
            data = row.group()
        return list(csv.open_csv(pa.BufferReader(data), **self._options([])).schema.names)

    def _options(self, names: list[str], keep_bad: Any = None, *, has_header: bool = True) -> dict[str, Any]:
        """Cells are bytes, so that one that is no UTF-8 is one bad row; `NA`, `None` and `null` are words."""
        return {
            "read_options": csv.ReadOptions(
                use_threads=False, block_size=2**30, column_names=None if has_header else names
            ),  # threads do not number the rows
            "parse_options": csv.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=keep_bad
            ),
            "convert_options": csv.ConvertOptions(
                column_types={name: pa.binary() for name in names}, null_values=[""], strings_can_be_null=True
            ),
        }

    def _end_of_rows(self, data: bytes) -> int:
        if b'"' not in data:
            return end_of_lines(data)
        end = 0
        while row := self._row.match(data, end):
            end = row.end()
        return end


@dataclass(frozen=True)
class CsvChunk:
    """Rows of a table; the last column says what is wrong with those that could not be read."""

    file: Path
    num_before: int  # lines, as the rows are written: the header is one
    table: pa.Table
    problems: list[str]
    next: Place

    def __len__(self) -> int:
        return int(self.table.num_rows) + len(self.problems)

    def read(self, first: int, last: int) -> list[dict[str, Any] | str]:
        cells = zip(*(column.to_pylist() for column in self.table.slice(first, last - first).columns), strict=True)
        number = max(1, self.num_before) + first  # of the row before
        rows = [self._row(number + index, values) for index, values in enumerate(cells, 1)]
        num_rows = self.table.num_rows
        return [*rows, *self.problems[max(0, first - num_rows) : max(0, last - num_rows)]]

    def _row(self, line: int, cells: tuple[bytes | None, ...]) -> dict[str, Any] | str:
        names = self.table.column_names
        try:
            return {name: cell if cell is None else cell.decode() for name, cell in zip(names, cells, strict=True)}
        except UnicodeDecodeError:
            return where_not_utf8(self.file) or f"{self.file}, line {line}: not UTF-8"
