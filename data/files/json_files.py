"""Rows of JSON files, each as the text that it has in its file, and what is wrong with a row.

Arrow's own reader guesses types from the first megabytes, gives each dict the keys of all others, and stops at a row
that is broken. So rows stay text until they are tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data.files.byte_chunks import UTF8_MARK, ByteChunks
from data.files.json_of_one_value import may_hold_lines, rows_of_one_value
from data.files.json_values import MAX_DEPTH, decode_row
from data.files.row_chunks import ItemChunk, Place, RowChunk, RowReader
from data.files.row_text import RowText, depth_of, not_utf8, row_of_value, too_deep
from utils.errors import ConfigError
from utils.units import readable

_ITEMS_AT_A_TIME = 1000
_MOST_OF_LINE = 2**28  # bytes: a compressed file of three megabytes may hold one line of three gigabytes
_SPACE = " \t\r\n"  # JSON's


def json_rows(file: Path, names: Sequence[str]) -> Iterator[RowText]:
    """The rows of a file of JSON lines, of a list, or of a list in an object, as in `{"data": [...]}`.

    Args:
        names: keys under which the rows of a split may stand, besides `data`.
    """
    if may_hold_lines(file):
        position = num_before = 0
        lines = ByteChunks(file, most=_MOST_OF_LINE)
        while (chunk := _line_chunk(file, lines, position, num_before)) is not None:
            yield from map(chunk.row, range(len(chunk)))
            position, num_before = chunk.next
        lines.close()
    else:
        yield from rows_of_one_value(file, names)


class JsonReader(RowReader):
    """The rows of such a file from any line on; of a list, from any item on, once the file is read as a whole."""

    def __init__(self, file: Path, names: Sequence[str]) -> None:
        self.file, self.names = file, names
        self._lines = ByteChunks(file, most=_MOST_OF_LINE) if may_hold_lines(file) else None
        self._items: Iterator[RowText] = iter(())
        self._next_item = -1

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        if self._lines is not None:
            return _line_chunk(self.file, self._lines, position, num_before)
        if position != self._next_item:
            self._items = islice(rows_of_one_value(self.file, self.names), position, None)
        rows = list(islice(self._items, _ITEMS_AT_A_TIME))
        self._next_item = position + len(rows)
        values = [row.problem or "" if row.value is None else row.value for row in rows]
        return ItemChunk(values, (self._next_item, 0)) if rows else None

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


@dataclass(frozen=True)
class LineChunk:
    """Lines of a file of JSON lines; blank ones are no rows."""

    file: Path
    position: int  # of its first byte
    num_before: int  # lines
    lines: list[bytes]
    places: Sequence[int]  # of the rows, in lines
    next: Place

    def __len__(self) -> int:
        return len(self.places)

    def read(self, first: int, last: int) -> list[dict[str, Any] | str]:
        rows = map(self.row, range(first, last))
        return [row.problem or "" if row.value is None else row.value for row in rows]

    def row(self, index: int) -> RowText:
        """A row and its text."""
        place = self.places[index]
        return _row_of_line(self, self.num_before + place + 1, self.lines[place])

    def position_of(self, number: int) -> int:
        """The first byte of a line."""
        before = self.lines[: number - self.num_before - 1]
        return self.position + sum(map(len, before)) + len(before)


def _line_chunk(file: Path, lines: ByteChunks, position: int, num_before: int) -> LineChunk | None:
    data = lines.at(position)
    if not data:
        return None
    if len(data) > _MOST_OF_LINE and b"\n" not in data:
        raise ConfigError(
            f"{file}, line {num_before + 1}: longer than {readable(_MOST_OF_LINE)}, which is no row; split it, each "
            "row on a line of its own"
        )
    parts = (data if position else data.removeprefix(UTF8_MARK)).split(b"\n")
    if not parts[-1]:
        del parts[-1]
    places: Sequence[int] = range(len(parts))
    if any(not line or line.isspace() for line in parts):
        places = [place for place in places if parts[place] and not parts[place].isspace()]
    following = (position + len(data), num_before + len(parts))
    return LineChunk(file, position, num_before, parts, places, following)


def _row_of_line(chunk: LineChunk, number: int, line: bytes) -> RowText:
    try:
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and (depth := depth_of(line)) > MAX_DEPTH:
            return RowText(None, None, too_deep(f"{chunk.file}, line {number}", depth))
        text = line.removeprefix(UTF8_MARK).decode()  # files that were put together have marks in the middle
        value = decode_row(text)
    except json.JSONDecodeError as error:
        return RowText(None, None, f"{chunk.file}, line {number}: broken JSON ({error.msg}, column {error.colno})")
    except UnicodeDecodeError:
        return RowText(None, None, not_utf8(chunk.file, number, chunk.position_of(number), line))
    except ValueError as error:  # a number of thousands of digits
        return RowText(None, None, f"{chunk.file}, line {number}: {error}")
    text = text.strip(_SPACE)
    if type(value) is dict and b"\\ud" not in line and b"\\uD" not in line:
        return RowText(text, value)
    return row_of_value(f"{chunk.file}, line {number}", text, value)
