"""Rows of JSON files, each as the text that it has in its file, and what is wrong with a row.

Arrow's own reader guesses types from the first megabytes, gives each dict the keys of all others, and stops at a row
that is broken. So rows stay text until they are tokenized.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.files.byte_chunks import CHUNK_BYTES, UTF8_MARK, ByteChunks, is_compressed, opened
from data.files.json_values import DECODER, MAX_DEPTH, DoubledKeyError, decode_row, with_spelling
from data.files.row_chunks import ItemChunk, Place, RowChunk, RowReader
from utils.errors import ConfigError
from utils.units import readable

_ITEMS_AT_A_TIME = 1000
_MOST_OF_LINE = 2**28  # bytes: a compressed file of three megabytes may hold one line of three gigabytes
_MOST_OF_ONE_VALUE = 2**30  # bytes of a compressed file that is read as a whole
_NO_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\[\]{}"]++', re.DOTALL)
_STEPS = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_SPACE = " \t\r\n"  # JSON's
_COLON = re.compile(r"\s*:\s*")
_BETWEEN, _BLANK = re.compile(r"[\s,]*"), re.compile(r"[\s\ufeff]*")  # a file's mark may stand in the middle
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class RowText(NamedTuple):
    """A row as JSON without space around it, and its value; or what is wrong with it, with file and line."""

    text: str | None
    value: dict[str, Any] | None = None
    problem: str | None = None


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
        yield from _rows_of_one_value(file, names)


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
            self._items = islice(_rows_of_one_value(self.file, self.names), position, None)
        rows = list(islice(self._items, _ITEMS_AT_A_TIME))
        self._next_item = position + len(rows)
        values = [row.problem or "" if row.value is None else row.value for row in rows]
        return ItemChunk(values, (self._next_item, 0)) if rows else None

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def may_hold_lines(file: Path) -> bool:
    """Whether a file is JSON lines, or may be: a .json file is, unless it is one list or one object."""
    return not file.name.endswith((".json", ".json.gz", ".json.zst")) or _start_of_one_value(file) is None


def lists_of_rows(file: Path) -> list[str]:
    """The keys of a file that is one JSON object, if their values are lists of rows."""
    if _first_character(file) != b"{" or may_hold_lines(file):
        return []
    try:
        value = json.loads(_whole(file))
    except (ValueError, RecursionError):  # reading the rows will say where
        return []
    return [key for key, rows in value.items() if _is_list_of_rows(rows)] if isinstance(value, dict) else []


def key_of_rows(lists: Sequence[str], names: Sequence[str]) -> str | None:
    """The key whose list holds the rows of a split, of those that are lists of rows; None: the object is a row."""
    return next((key for key in (*names, "data") if key in lists), None)


def where_not_utf8(file: Path) -> str:
    """Where a file stops being UTF-8, and what to do: `FILE, line N, byte M: ...`; empty if it is all UTF-8."""
    with opened(file) as stream:
        position = 0
        for number, line in enumerate(stream, 1):
            if problem := _not_utf8(file, number, position, line):
                return problem
            position += len(line)
    return ""


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
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and (depth := _depth(line)) > MAX_DEPTH:
            return RowText(None, None, _too_deep(f"{chunk.file}, line {number}", depth))
        text = line.removeprefix(UTF8_MARK).decode()  # files that were put together have marks in the middle
        value = decode_row(text)
    except json.JSONDecodeError as error:
        return RowText(None, None, f"{chunk.file}, line {number}: broken JSON ({error.msg}, column {error.colno})")
    except UnicodeDecodeError:
        return RowText(None, None, _not_utf8(chunk.file, number, chunk.position_of(number), line))
    except ValueError as error:  # a number of thousands of digits
        return RowText(None, None, f"{chunk.file}, line {number}: {error}")
    text = text.strip(_SPACE)
    if type(value) is dict and b"\\ud" not in line and b"\\uD" not in line:
        return RowText(text, value)
    return _row_of_value(f"{chunk.file}, line {number}", text, value)


def _row_of_value(where: str, text: str, value: Any) -> RowText:
    if not isinstance(value, dict):
        return RowText(None, None, f"{where}: not a JSON object but {type(value).__name__}")
    if _HALF_CHARACTER.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return RowText(None, None, f"{where}: holds half of a character (\\ud83d or the like, alone)")
    return RowText(text, value)


def _start_of_one_value(file: Path) -> bytes | None:
    """The first bytes of a .json file if it is one list or one object; None if it holds JSON lines."""
    with opened(file) as stream:
        start = stream.read(CHUNK_BYTES).removeprefix(UTF8_MARK).lstrip()
    if start[:1] == b"{":
        first, _, more = start.partition(b"\n")
        return None if more.strip() and _is_object(first) else start
    return start if start[:1] == b"[" else None


def _rows_of_one_value(file: Path, names: Sequence[str]) -> Iterator[RowText]:
    try:
        text = _whole(file).lstrip().decode()
    except UnicodeDecodeError:
        return iter([RowText(None, None, where_not_utf8(file))])
    return _rows_of_list(file, text) if text.startswith("[") else _rows_of_object(file, text, names)


def _whole(file: Path) -> bytes:
    """The contents of a file that is one value.

    Raises:
        ConfigError: if it is compressed, and too large to be read as a whole.
    """
    with opened(file) as stream:
        data = stream.read(_MOST_OF_ONE_VALUE + 1) if is_compressed(file) else stream.read()
    if is_compressed(file) and len(data) > _MOST_OF_ONE_VALUE:
        raise ConfigError(
            f"{file}: one JSON value of more than {readable(_MOST_OF_ONE_VALUE)}, which has to be read as a whole; "
            "write its rows as JSON lines (.jsonl), which are read in parts"
        )
    return data.removeprefix(UTF8_MARK)


def _first_character(file: Path) -> bytes:
    with opened(file) as stream:
        return stream.read(CHUNK_BYTES).removeprefix(UTF8_MARK).lstrip()[:1]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _rows_of_list(file: Path, text: str) -> Iterator[RowText]:
    """Each item as its own part of the text, so that no more than one is in memory as objects.

    Another list may follow, as in files that were put together with `cat`.
    """
    position, number = _BETWEEN.match(text, 1).end(), 0  # type: ignore[union-attr]
    while position < len(text):
        if text[position] == "]":
            position = _BLANK.match(text, position + 1).end()  # type: ignore[union-attr]
            if position == len(text):
                return
            if text[position] != "[":
                line = text.count("\n", 0, position) + 1
                yield RowText(None, None, f"{file}, line {line}: text after the end of the list, which is not read")
                return
            position = _BETWEEN.match(text, position + 1).end()  # type: ignore[union-attr]
            continue
        number += 1
        where = f"{file}, item {number}"
        try:
            value, end = DECODER.raw_decode(text, position)
        except DoubledKeyError as error:
            yield RowText(None, None, f"{where}: {error}")
            position = _BETWEEN.match(text, json.JSONDecoder().raw_decode(text, position)[1]).end()  # type: ignore[union-attr]
            continue
        except json.JSONDecodeError as error:
            yield RowText(None, None, f"{file}, line {error.lineno}: broken JSON ({error.msg}, column {error.colno})")
            return
        except RecursionError:
            yield RowText(None, None, _too_deep(where, _depth(text[position:].encode())))
            return
        item = text[position:end]
        if item.count("[") + item.count("{") > MAX_DEPTH and (depth := _depth(item.encode())) > MAX_DEPTH:
            yield RowText(None, None, _too_deep(where, depth))
        else:
            yield _row_of_value(where, item, with_spelling(item, value))
        position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    line = text.count("\n") + 1
    yield RowText(None, None, f"{file}, line {line}: broken JSON (the list does not end)")


def _rows_of_object(file: Path, text: str, names: Sequence[str]) -> Iterator[RowText]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        yield RowText(None, None, f"{file}, line {error.lineno}: broken JSON ({error.msg}, column {error.colno})")
        return
    except RecursionError:
        yield RowText(None, None, _too_deep(str(file), _depth(text.encode())))
        return
    key = key_of_rows([key for key, rows in value.items() if _is_list_of_rows(rows)], names)
    for number, item in enumerate([text.strip()] if key is None else _items_of(text, key), 1):
        where = str(file) if key is None else f"{file}, item {number} of {key}"
        if (depth := _depth(item.encode())) > MAX_DEPTH:
            yield RowText(None, None, _too_deep(where, depth))
            continue
        try:
            yield _row_of_value(where, item, decode_row(item))
        except DoubledKeyError as error:
            yield RowText(None, None, f"{where}: {error}")


def _items_of(text: str, key: str) -> Iterator[str]:
    """The items of the list under a key of a JSON object, as they are written."""
    decoder, position = json.JSONDecoder(), _BETWEEN.match(text, 1).end()  # type: ignore[union-attr]
    while True:
        name, end = decoder.raw_decode(text, position)
        position = _COLON.match(text, end).end()  # type: ignore[union-attr]
        if name == key:
            break
        position = _BETWEEN.match(text, decoder.raw_decode(text, position)[1]).end()  # type: ignore[union-attr]
    position = _BETWEEN.match(text, position + 1).end()  # type: ignore[union-attr]
    while text[position] != "]":
        _, end = decoder.raw_decode(text, position)
        yield text[position:end]
        position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _depth(text: bytes) -> int:
    brackets = np.frombuffer(_NO_BRACKETS.sub(b"", text), dtype=np.uint8)
    return int(np.cumsum(_STEPS[brackets]).max(initial=0))


def _too_deep(where: str, depth: int) -> str:
    return f"{where}: JSON that is nested {depth:,} deep, and {MAX_DEPTH} is the most that can be read"


def _not_utf8(file: Path, number: int, position: int, line: bytes) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        byte = line[error.start]
        if not position and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return f"{file}: UTF-16, not UTF-8; write it anew with `iconv -f utf-16 -t utf-8`"
        return (
            f"{file}, line {number}, byte {position + error.start + 1}: not UTF-8 (0x{byte:02x}); if it is Latin-1, "
            f"write it anew with `iconv -f latin1 -t utf-8`"
        )
    return ""
