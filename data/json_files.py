"""Rows of JSON files, each as the text that it has in its file, and what is wrong with a row.

Arrow's own reader guesses types from the first megabytes, gives each dict the keys of all others, and stops at a row
that is broken. So rows stay text until they are tokenised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

MAX_DEPTH = 60
"""Of nested lists and objects. What comes after the reader recurses: templates, Python's json, Arrow."""

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_CHUNK_BYTES = 2**23
_UTF8_MARK = b"\xef\xbb\xbf"
_NO_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\[\]{}"]++', re.DOTALL)
_STEPS = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_BETWEEN = re.compile(r"[\s,]*")
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class RowText(NamedTuple):
    """A row as JSON, and its keys; or what is wrong with it, with file and line."""

    text: str | None
    keys: Iterable[str] = ()
    problem: str | None = None


def json_rows(file: Path, names: Sequence[str]) -> Iterator[RowText]:
    """The rows of a file of JSON lines, of a list, or of a list in an object, as in `{"data": [...]}`.

    Args:
        names: keys under which the rows of a split may stand, beside `data`.
    """
    if not file.name.endswith((".json", ".json.gz", ".json.zst")):
        return _rows_of_lines(file)
    try:
        text = _text_of_one_value(file)
    except UnicodeDecodeError:
        return iter([RowText(None, (), where_not_utf8(file))])
    if text is None:
        return _rows_of_lines(file)
    return _rows_of_list(file, text) if text.startswith("[") else _rows_of_object(file, text, names)


def lists_of_rows(file: Path) -> list[str]:
    """The keys of a file that is one JSON object, if their values are lists of rows."""
    if file.suffix != ".json" or _first_character(file) != b"{":
        return []
    try:
        value = json.loads(_text_of_one_value(file) or "{}")
    except (ValueError, RecursionError):  # reading the rows will say where
        return []
    return [key for key, rows in value.items() if _is_list_of_rows(rows)] if isinstance(value, dict) else []


def where_not_utf8(file: Path) -> str:
    """Where a file stops being UTF-8, and what to do: `FILE, line N, byte M: ...`; empty if it is all UTF-8."""
    with opened(file) as stream:
        position = 0
        for number, line in enumerate(stream, 1):
            if problem := _not_utf8(file, number, position, line):
                return problem
            position += len(line)
    return ""


def opened(file: Path) -> IO[bytes]:
    """The file's bytes, decompressed by its name."""
    stream = open(file, "rb")  # noqa: SIM115 (the caller closes it)
    compression = _COMPRESSIONS.get(file.suffix)
    return stream if compression is None else cast(IO[bytes], pa.CompressedInputStream(stream, compression))


def _rows_of_lines(file: Path) -> Iterator[RowText]:
    position = 0
    for number, line in enumerate(_lines(file), 1):
        if line and not line.isspace():
            yield _row_of_line(file, number, position, line)
        position += len(line) + 1


def _lines(file: Path) -> Iterator[bytes]:
    """The lines without their ends; not by the stream's own iterator, which is slow if the stream is Arrow's."""
    with opened(file) as stream:
        rest = stream.read(_CHUNK_BYTES)
        rest = rest.removeprefix(_UTF8_MARK)
        parts: list[bytes] = []  # of a line longer than a chunk: joined once
        while rest:
            *lines, last = rest.split(b"\n")
            if lines:
                yield b"".join([*parts, lines[0]])
                yield from lines[1:]
                parts = []
            parts.append(last)
            rest = stream.read(_CHUNK_BYTES)
        if any(parts):
            yield b"".join(parts)


def _row_of_line(file: Path, number: int, position: int, line: bytes) -> RowText:
    where = f"{file}, line {number}"
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and (depth := _depth(line)) > MAX_DEPTH:
        return RowText(None, (), _too_deep(where, depth))
    try:
        text = line.decode()
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return RowText(None, (), f"{where}: broken JSON ({error.msg}, column {error.colno})")
    except UnicodeDecodeError:
        return RowText(None, (), _not_utf8(file, number, position, line))
    except ValueError as error:  # a number of thousands of digits
        return RowText(None, (), f"{where}: {error}")
    return _row_of_value(where, text, value)


def _row_of_value(where: str, text: str, value: Any) -> RowText:
    if not isinstance(value, dict):
        return RowText(None, (), f"{where}: not a JSON object but {type(value).__name__}")
    if _HALF_CHARACTER.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return RowText(None, (), f"{where}: holds half of a character (\\ud83d or the like, alone)")
    return RowText(text, tuple(value))


def _text_of_one_value(file: Path) -> str | None:
    """The text of a .json file if it is one list or one object; None if it holds JSON lines.

    Raises:
        UnicodeDecodeError: if it is not UTF-8.
    """
    with opened(file) as stream:
        start = stream.read(_CHUNK_BYTES).removeprefix(_UTF8_MARK).lstrip()
        if start[:1] == b"{":
            first, _, more = start.partition(b"\n")
            if more.strip() and _is_object(first):
                return None
        elif start[:1] != b"[":
            return None
        return (start + stream.read()).decode()


def _first_character(file: Path) -> bytes:
    with opened(file) as stream:
        return stream.read(_CHUNK_BYTES).removeprefix(_UTF8_MARK).lstrip()[:1]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _rows_of_list(file: Path, text: str) -> Iterator[RowText]:
    """Each item as its own part of the text, so that no more than one is in memory as objects."""
    decoder, position, number = json.JSONDecoder(), _BETWEEN.match(text, 1).end(), 0  # type: ignore[union-attr]
    while position < len(text) and text[position] != "]":
        number += 1
        where = f"{file}, item {number}"
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield RowText(None, (), f"{file}, line {error.lineno}: broken JSON ({error.msg}, column {error.colno})")
            return
        except RecursionError:
            yield RowText(None, (), _too_deep(where, _depth(text[position:].encode())))
            return
        item = text[position:end]
        if item.count("[") + item.count("{") > MAX_DEPTH and (depth := _depth(item.encode())) > MAX_DEPTH:
            yield RowText(None, (), _too_deep(where, depth))
        else:
            yield _row_of_value(where, item, value)
        position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    if position >= len(text):
        line = text.count("\n") + 1
        yield RowText(None, (), f"{file}, line {line}: broken JSON (the list does not end)")


def _rows_of_object(file: Path, text: str, names: Sequence[str]) -> Iterator[RowText]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        yield RowText(None, (), f"{file}, line {error.lineno}: broken JSON ({error.msg}, column {error.colno})")
        return
    except RecursionError:
        yield RowText(None, (), _too_deep(str(file), _depth(text.encode())))
        return
    key = next((key for key in (*names, "data") if _is_list_of_rows(value.get(key))), None)
    items = [value] if key is None else value[key]
    for number, item in enumerate(items, 1):
        line = json.dumps(item)
        where = str(file) if key is None else f"{file}, item {number} of {key}"
        if (depth := _depth(line.encode())) > MAX_DEPTH:
            yield RowText(None, (), _too_deep(where, depth))
        else:
            yield _row_of_value(where, line, item)


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
        return (
            f"{file}, line {number}, byte {position + error.start + 1}: not UTF-8 (0x{byte:02x}); if it is Latin-1, "
            f"write it anew with `iconv -f latin1 -t utf-8`"
        )
    return ""
