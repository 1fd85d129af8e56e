"""Rows of CSV and TSV files, each as JSON text; every cell is text, and an empty one is null.

Spreadsheets of countries that write 1,5 put semicolons between cells, and some programs tabs: a .csv file whose first
line has no comma outside of quotes is read so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from data.files.byte_chunks import UTF8_MARK, ByteChunks
from data.files.csv_grammar import CsvGrammar, Quoting, count_lines
from data.files.row_chunks import ItemChunk, Place, RowChunk, RowReader
from data.files.row_text import RowText, where_not_utf8
from utils.wording import plural

_HEAD_BYTES, _MOST_BYTES = 2**16, 2**24  # of a file, which are enough for most headers; and of a row


def csv_rows(file: Path, quoting: Quoting = "auto") -> Iterator[RowText]:
    """The rows of a file whose first line names its columns; TSV if it is called so."""
    reader = CsvReader(file, quoting)
    place: Place = (0, 0)
    while (chunk := reader.chunk(*place)) is not None:
        for row in chunk.read(0, len(chunk)):
            yield RowText(None, None, row) if isinstance(row, str) else RowText(json.dumps(row), row)
        place = chunk.next
    reader.close()


def _delimiter(file: Path, quoting: Quoting) -> bytes:
    if file.suffix == ".tsv":
        return b"\t"
    with file.open("rb") as stream:
        names = stream.readline(_MOST_BYTES)
    names = names if quoting == "none" else re.sub(rb'"[^"]*"', b"", names)
    return next((delimiter for delimiter in (b",", b"\t", b";") if delimiter in names), b",")


class CsvReader(RowReader):
    """The rows of such a file from any row on: a row's end is a line's end outside of quotes."""

    def __init__(self, file: Path, quoting: Quoting = "auto") -> None:
        self.file = file
        self._grammar = CsvGrammar(file, _delimiter(file, quoting), quoting)
        self._bytes = ByteChunks(file, self._grammar.end_of_rows, most=_MOST_BYTES)
        self._names: list[str] = []

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        data = self._bytes.at(position)
        if not data:
            return None
        following, end_of_file = position + len(data), self.file.stat().st_size
        data = data if position else data.removeprefix(UTF8_MARK)
        if following == end_of_file and (unclosed := self._unclosed(data)):
            if unclosed == data:
                num_lines = len(data.splitlines())
                problem = f"{self.file}, line {num_before + 1}: a quote is not closed"
                problem += f", so {plural(num_lines - 1, 'line')} after it cannot be read" if num_lines > 1 else ""
                return ItemChunk([problem], (following, num_before + num_lines))
            data = data.removesuffix(unclosed)
            following -= len(unclosed)
        place = (following, num_before + count_lines(data))
        if len(data) > _MOST_BYTES and not self._grammar.end_of_rows(data):
            problem = (
                f"{self.file}, line {num_before + 1}: a row longer than {_MOST_BYTES >> 20} MiB; is a quote not closed?"
            )
            return ItemChunk([problem], (end_of_file, place[1]))
        try:
            if not self._names and (problem := self._read_header()):  # whichever chunk comes first
                return ItemChunk([problem], (end_of_file, place[1]))
            if not position:
                header = self._grammar.first_row(data)
                data, num_before = data[len(header) :], count_lines(header)
            parts = list(self._parts(_ended(data), num_before))
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            problem = where_not_utf8(self.file) or f"{self.file}: {' '.join(str(error).split())[:300]}"
            return ItemChunk([problem], (end_of_file, place[1]))
        if len(parts) == 1 and isinstance(parts[0], pa.Table):
            return CsvChunk(self.file, parts[0], place)
        rows = (
            [part] if isinstance(part, str) else CsvChunk(self.file, part, place).read(0, len(part)) for part in parts
        )
        return ItemChunk([row for some in rows for row in some], place)

    def names(self) -> list[str]:
        """The columns; none if the first row cannot be read."""
        try:
            return [] if self._read_header() else self._names
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return []

    def close(self) -> None:
        self._bytes.close()

    def _unclosed(self, data: bytes) -> bytes:
        """The end of the file, from the row on whose last quote is not closed; b"" if all are."""
        rest = data[self._grammar.end_of_rows(data) :]
        return b"" if self._grammar.is_row(rest) else rest

    def _read_header(self) -> str:
        """Read the names of the columns from the first row; what is wrong with it, or nothing."""
        data = header = b""
        with self.file.open("rb") as stream:
            for num_bytes in (_HEAD_BYTES, _MOST_BYTES):
                data += stream.read(num_bytes - len(data))
                header = self._grammar.first_row(data.removeprefix(UTF8_MARK)).lstrip(b"\r\n")
                if header.endswith((b"\r", b"\n")):
                    break
        if not header:
            return ""
        # Alone: arrow prints a traceback for later rows that are no UTF-8.
        names = list(csv.open_csv(pa.BufferReader(header), **self._options(None)).schema.names)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            return f"{self.file}: names the column {twice[0]} twice"
        grammar = replace(self._grammar, num_columns=len(names))
        if bad := next(grammar.bad_rows(_ended(header)), None):
            return f"{self.file}, line 1: {bad.reason}"
        self._grammar, self._names = replace(grammar, header=header.rstrip(b"\r\n")), names
        return ""

    def _parts(self, data: bytes, num_before: int) -> Iterator[pa.Table | str]:
        """Tables of the rows that can be read, and between them what is wrong with one that cannot.

        Args:
            num_before: lines before the data.
        """
        position = 0
        for bad in (*self._grammar.bad_rows(data), None):
            good = data[position : bad.start if bad else None]
            if good.strip(b"\r\n"):
                yield csv.read_csv(pa.BufferReader(good), **self._options(self._names))
            if bad:
                num_before += count_lines(good)
                yield self._problem(data[bad.start : bad.end], num_before + 1, bad.reason)
                num_before += count_lines(data[bad.start : bad.end])
                position = bad.end

    def _problem(self, row: bytes, line: int, reason: str) -> str:
        try:
            row.decode()
        except UnicodeDecodeError:
            return where_not_utf8(self.file)
        return f"{self.file}, line {line}: {reason}"

    def _options(self, names: list[str] | None) -> dict[str, Any]:
        """Cells are bytes, so that one that is no UTF-8 is one bad row; `NA`, `None` and `null` are words.

        Args:
            names: of the columns; None: the first row has them.
        """
        quote = False if self._grammar.quoting == "none" else '"'
        return {
            "read_options": csv.ReadOptions(use_threads=False, block_size=2**30, column_names=names),
            "parse_options": csv.ParseOptions(
                delimiter=self._grammar.delimiter.decode(), quote_char=quote, newlines_in_values=True
            ),
            "convert_options": csv.ConvertOptions(
                column_types={name: pa.binary() for name in names or ()}, null_values=[""], strings_can_be_null=True
            ),
        }


def _ended(data: bytes) -> bytes:
    """The rows, the last with its line's end."""
    return data if data.endswith((b"\n", b"\r")) or not data else data + b"\n"


@dataclass(frozen=True)
class CsvChunk:
    """Rows of a table, decoded when they are read."""

    file: Path
    table: pa.Table
    next: Place

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def read(self, first: int, last: int) -> list[dict[str, Any] | str]:
        cells = zip(*(column.to_pylist() for column in self.table.slice(first, last - first).columns), strict=True)
        return [self._row(values) for values in cells]

    def _row(self, cells: tuple[bytes | None, ...]) -> dict[str, Any] | str:
        names = self.table.column_names
        try:
            return {name: cell if cell is None else cell.decode() for name, cell in zip(names, cells, strict=True)}
        except UnicodeDecodeError:
            return where_not_utf8(self.file) or f"{self.file}: not UTF-8"
