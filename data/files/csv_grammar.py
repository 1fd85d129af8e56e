"""Where rows of CSV and TSV files end, and which of them are not written as such files are.

A cell that begins with a quote ends at the next quote that is not doubled. If a quote was meant as text, the next one
may be many lines later, or in the middle of a text: readers then merge rows, or garble the cell. Such rows are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from data.files.byte_chunks import UTF8_MARK

Quoting = Literal["auto", "double", "none"]

_HEAD_BYTES = 2**24  # of a file, which show whether its cells have line breaks
_MANY_CELLS = 20
_MANY_LINES = 12  # of a cell: not all of a text's lines have as many delimiters as a row by chance
_END_OF_LINE = re.compile(rb"[\r\n]")
_LINE_END = rb"(?:\r\n|\n|\r)"


class BadRow(NamedTuple):
    """Bytes of some data that are no row of a table."""

    start: int
    end: int
    reason: str


class _Cell(NamedTuple):
    """A quoted cell with line breaks."""

    data: bytes
    found: re.Match[bytes]
    start: int
    num_breaks: int

    @property
    def has_doubled_quotes(self) -> bool:
        """Whether a program wrote it, which knows how."""
        return b'""' in self.found[1]

    @property
    def is_short(self) -> bool:
        return self.num_breaks < _MANY_LINES

    def lines(self) -> list[bytes]:
        """The whole lines on which it stands."""
        first = self.data.rfind(b"\n", 0, self.found.start()) + 1
        first = max(first, self.data.rfind(b"\r", first, self.found.start()) + 1)
        end = _END_OF_LINE.search(self.data, self.found.end())
        return self.data[first : end.start() if end else None].splitlines()


def count_lines(data: bytes) -> int:
    """The number of line ends."""
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


@dataclass(frozen=True)
class CsvGrammar:
    """The rows of a file.

    Args:
        quoting: `double`: a cell may stand in quotes. `auto`: the same, but what could be several rows is refused.
            `none`: quotes are text.
        header: the first row, without its line's end; empty until it is known.
        num_columns: of the header.
    """

    file: Path
    delimiter: bytes
    quoting: Quoting
    header: bytes = b""
    num_columns: int = 0

    def end_of_rows(self, data: bytes) -> int:
        """Where the last whole row of these bytes ends; 0 without one. They begin where a row does."""
        if self.quoting == "none" or b'"' not in data:
            return data.rfind(b"\n") + 1
        end = len(UTF8_MARK) if data.startswith(UTF8_MARK) else 0
        while row := self._row.match(data, end):
            end = row.end()
        return end

    def is_row(self, data: bytes) -> bool:
        """Whether these bytes, with a line's end, are a row."""
        return self._row.fullmatch(data + b"\n") is not None

    def first_row(self, data: bytes) -> bytes:
        """The first row, with blank lines before it; all of the data if it does not end."""
        row = self._row.match(data, len(data) - len(data.lstrip(b"\r\n")))
        return data[: row.end()] if row else data

    def bad_rows(self, data: bytes) -> Iterator[BadRow]:
        """The rows that have another number of cells, whose quotes may be text, or that are the header, in their order.

        Args:
            data: whole rows, each with its line's end.
        """
        position = 0
        while position < len(data):
            end_of_good = self._good_rows.match(data, position).end()  # type: ignore[union-attr]
            yield from self._merged_rows(data, position, end_of_good)
            if end_of_good == len(data):
                return
            row = self._row.match(data, end_of_good)
            position = row.end() if row else len(data)
            yield BadRow(end_of_good, position, self._reason(data[end_of_good:position]))

    def _reason(self, row: bytes) -> str:
        if row.removeprefix(UTF8_MARK).rstrip(b"\r\n") == self.header:
            return "the header again; were several files put together?"
        cell, position, num_cells = re.compile(b"(%b)(%b)" % (self._quoted, self._text)), 0, 0
        plain = re.compile(b"()(%b)" % self._text)
        while found := cell.match(row, position) or plain.match(row, position):
            num_cells += 1
            if found[1] and found[2]:
                over = f" over {count_lines(row)} lines" if count_lines(row) > 1 else ""
                how = 'are written "" and not \\"' if b'\\"' in row else 'are written ""'
                return (
                    f"text after the closing quote of a cell{over}; quotes inside a cell {how}, and .quoting none "
                    "takes all quotes as text"
                )
            if not row.startswith(self.delimiter, found.end()):
                break
            position = found.end() + len(self.delimiter)
        return f"{num_cells} cells and not {self.num_columns}"

    def _merged_rows(self, data: bytes, start: int, end: int) -> Iterator[BadRow]:
        """Of the good rows in a part of the data those with a cell over several lines, each of which reads as a row."""
        if self.quoting != "auto" or self.num_columns < 2:
            return
        for cell in self._cells_over_lines(data[start:end], start):
            if cell.start < start or not self._may_be_rows(cell):
                continue
            while (row := self._row.match(data, start)) and row.end() <= cell.start:
                start = row.end()
            reason = f"a quoted cell over {cell.num_breaks + 1} lines, each of which reads as a row of its own"
            remedy = ".quoting double takes it as one cell, and .quoting none takes quotes as text"
            yield BadRow(start, row.end() if row else end, f"{reason}; {remedy}")
            start = row.end() if row else end

    def _may_be_rows(self, cell: _Cell) -> bool:
        is_known = cell.is_short and self._has_line_breaks
        return not is_known and self._reads_as_rows(cell)

    def _reads_as_rows(self, cell: _Cell) -> bool:
        return all(line.count(self.delimiter) == self.num_columns - 1 for line in cell.lines())

    @cached_property
    def _has_line_breaks(self) -> bool:
        """Whether the file's beginning has many cells with line breaks that cannot be several rows.

        Some may then look like rows by chance: of two columns, a line with one comma does.
        """
        with self.file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        cells = self._cells_over_lines(head)
        proofs = (cell for cell in cells if cell.has_doubled_quotes or not self._reads_as_rows(cell))
        return sum(1 for _ in islice(proofs, _MANY_CELLS)) == _MANY_CELLS

    def _cells_over_lines(self, data: bytes, offset: int = 0) -> Iterator[_Cell]:
        """The quoted cells with line breaks. `offset` is that of the data."""
        if b'"' not in data:
            return
        opening = rb'"(?<=[%b\r\n]")' % self._between  # the quote first: the search for a single byte is fast
        cells = re.compile(rb'%b([^"]*+(?:""[^"]*+)*+)"(?=[%b\r\n])' % (opening, self._between))
        data = b"\n" + data
        for found in cells.finditer(data):
            if num_breaks := count_lines(found[1]):
                yield _Cell(data, found, offset + found.start() - 1, num_breaks)

    @cached_property
    def _row(self) -> re.Pattern[bytes]:
        """A row as lenient readers take it; possessive quantifiers let no cell be cut in between."""
        cell = self._text if self.quoting == "none" else b'(?:%b|(?!"))%b' % (self._quoted, self._text)
        return re.compile(b"(?:%b%b)*+%b%b" % (cell, self._between, cell, _LINE_END))

    @cached_property
    def _good_rows(self) -> re.Pattern[bytes]:
        """Rows without anything after a closing quote, and blank lines; a header of one column may be a row, too."""
        cell = self._text if self.quoting == "none" else b'(?:%b|(?!")%b)' % (self._quoted, self._text)
        cells = b"(?:%b%b){%d}%b" % (cell, self._between, self.num_columns - 1, cell)
        header = b"(?!(?:%b)?%b%b)" % (UTF8_MARK, re.escape(self.header), _LINE_END) if self.num_columns > 1 else b""
        return re.compile(b"(?:%b%b%b|%b)*+" % (header, cells, _LINE_END, _LINE_END))

    @property
    def _between(self) -> bytes:
        return re.escape(self.delimiter)

    @property
    def _text(self) -> bytes:
        return rb"[^%b\r\n]*+" % self._between

    @property
    def _quoted(self) -> bytes:
        return b"(?!)" if self.quoting == "none" else b'"[^"]*+(?:""[^"]*+)*+"'
