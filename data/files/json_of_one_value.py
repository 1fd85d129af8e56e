"""JSON files that are one value: a list of rows, an object with such lists, or one row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.files.byte_chunks import CHUNK_BYTES, UTF8_MARK, is_compressed, opened
from data.files.json_values import DECODER, MAX_DEPTH, DoubledKeyError, decode_row, with_spelling
from data.files.row_text import RowText, depth_of, row_of_value, too_deep, where_not_utf8
from utils.errors import ConfigError
from utils.units import readable

_MOST_OF_ONE_VALUE = 2**30  # bytes of a compressed file that is read as a whole
_COLON = re.compile(r"\s*:\s*")
_BETWEEN, _BLANK = re.compile(r"[\s,]*"), re.compile(r"[\s\ufeff]*")  # a file's mark may stand in the middle


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


def _start_of_one_value(file: Path) -> bytes | None:
    """The first bytes of a .json file if it is one list or one object; None if it holds JSON lines."""
    with opened(file) as stream:
        start = stream.read(CHUNK_BYTES).removeprefix(UTF8_MARK).lstrip()
    if start[:1] == b"{":
        first, _, more = start.partition(b"\n")
        return None if more.strip() and _is_object(first) else start
    return start if start[:1] == b"[" else None


def rows_of_one_value(file: Path, names: Sequence[str]) -> Iterator[RowText]:
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
            yield RowText(None, None, too_deep(where, depth_of(text[position:].encode())))
            return
        item = text[position:end]
        if item.count("[") + item.count("{") > MAX_DEPTH and (depth := depth_of(item.encode())) > MAX_DEPTH:
            yield RowText(None, None, too_deep(where, depth))
        else:
            yield row_of_value(where, item, with_spelling(item, value))
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
        yield RowText(None, None, too_deep(str(file), depth_of(text.encode())))
        return
    key = key_of_rows([key for key, rows in value.items() if _is_list_of_rows(rows)], names)
    for number, item in enumerate([text.strip()] if key is None else _items_of(text, key), 1):
        where = str(file) if key is None else f"{file}, item {number} of {key}"
        if (depth := depth_of(item.encode())) > MAX_DEPTH:
            yield RowText(None, None, too_deep(where, depth))
            continue
        try:
            yield row_of_value(where, item, decode_row(item))
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
