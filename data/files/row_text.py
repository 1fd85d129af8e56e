"""A row as the text that it has in its file, and what may be wrong with such a text."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.files.byte_chunks import opened
from data.files.json_values import MAX_DEPTH

_NO_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\[\]{}"]++', re.DOTALL)
_STEPS = np.zeros(256, dtype=np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class RowText(NamedTuple):
    """A row as JSON without space around it, and its value; or what is wrong with it, with file and line."""

    text: str | None
    value: dict[str, Any] | None = None
    problem: str | None = None


def row_of_value(where: str, text: str, value: Any) -> RowText:
    if not isinstance(value, dict):
        return RowText(None, None, f"{where}: not a JSON object but {type(value).__name__}")
    if _HALF_CHARACTER.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return RowText(None, None, f"{where}: holds half of a character (\\ud83d or the like, alone)")
    return RowText(text, value)


def where_not_utf8(file: Path) -> str:
    """Where a file stops being UTF-8, and what to do: `FILE, line N, byte M: ...`; empty if it is all UTF-8."""
    with opened(file) as stream:
        position = 0
        for number, line in enumerate(stream, 1):
            if problem := not_utf8(file, number, position, line):
                return problem
            position += len(line)
    return ""


def depth_of(text: bytes) -> int:
    brackets = np.frombuffer(_NO_BRACKETS.sub(b"", text), dtype=np.uint8)
    return int(np.cumsum(_STEPS[brackets]).max(initial=0))


def too_deep(where: str, depth: int) -> str:
    return f"{where}: JSON that is nested {depth:,} deep, and {MAX_DEPTH} is the most that can be read"


def not_utf8(file: Path, number: int, position: int, line: bytes) -> str:
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
