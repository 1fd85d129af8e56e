"""Rows of a Hugging Face dataset as Python values. A row with a text that is not UTF-8 is known by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from data.tokens.spans import BadExample

Batch = Mapping[str, Sequence[Any]] | Sequence[dict[str, Any] | BadExample | str]
"""Columns; or rows, and for each that cannot be read what is wrong with it (a text names its file and line, too)."""


def read_rows(data: datasets.Dataset, first: int, last: int) -> Batch:
    """The rows [first, last) as columns; row by row if some of them cannot be decoded."""
    try:
        columns: Mapping[str, Sequence[Any]] = data[first:last]
        return columns
    except UnicodeDecodeError:
        return [_row(data, place) for place in range(first, min(last, len(data)))]


def _row(data: datasets.Dataset, place: int) -> dict[str, Any] | BadExample:
    try:
        row: dict[str, Any] = data[place]
        return row
    except UnicodeDecodeError as error:
        column = next((name for name in data.column_names if not _is_decoded(data.select_columns([name]), place)), "")
        byte = error.object[error.start]
        return BadExample(f"column {column} holds text that is not UTF-8 (0x{byte:02x}, its byte {error.start + 1})")


def _is_decoded(data: datasets.Dataset, place: int) -> bool:
    try:
        data[place]
    except UnicodeDecodeError:
        return False
    return True
