"""Columns that a row may have besides its text: more text, earlier turns, images and sound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data.files.json_values import parse_json
from data.tokens.spans import BadExample

MEDIA = ("image", "audio", "video")
MEDIA_COLUMNS = (*(f"{medium}s" for medium in MEDIA), *MEDIA)


def optional_text(example: Mapping[str, Any], name: str | None) -> str:
    """The text of a column; empty if the row has none.

    Raises:
        BadExample: if it holds anything else.
    """
    value = example.get(name) if name else None
    if isinstance(value, bool) or (value is not None and not isinstance(value, str | int | float)):
        raise BadExample(f"column {name} is not text but {type(value).__name__}")
    return "" if value is None or is_nan(value) else text_of(name, value)


def text_of(name: str | None, value: str | float) -> str:
    """A value of a column as text: a number as it is written.

    Raises:
        BadExample: if it is an infinite number that the data does not spell out, as 1e999 does.
    """
    text = str(value)
    if isinstance(value, float) and text.lower().lstrip("-").startswith("inf"):
        raise BadExample(f"column {name} is not text but the number {text}")
    return text


def is_nan(value: Any) -> bool:
    """Whether a value is pandas' for an empty cell, which it writes into JSON as NaN."""
    return isinstance(value, float) and value != value


def read_history(example: Mapping[str, Any], name: str | None) -> Iterator[tuple[str, str]]:
    """Earlier questions and answers of a column: a list of pairs, or its JSON.

    Raises:
        BadExample: if the column holds anything else.
    """
    history = example.get(name) if name else None
    if isinstance(history, str) and history.strip():
        try:
            history = parse_json(history)
        except ValueError as error:
            raise BadExample(f"column {name} is no JSON ({error})") from error
    if history and not isinstance(history, list):
        raise BadExample(f"column {name} is no list of pairs but {type(history).__name__}")
    for number, turn in enumerate(history or [], 1):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise BadExample(f"column {name}, turn {number}: not [instruction, answer], two texts")
        yield turn[0], turn[1]


def refuse_media(example: Mapping[str, Any], texts: Iterable[str], trained_on: str = "text alone") -> None:
    """Refuse a row with images, sound or video, which no model for text reads.

    Args:
        texts: a column `image` may be about anything else; it is one if `<image>` stands in one of these.

    Raises:
        BadExample: naming the column.
    """
    for column in MEDIA_COLUMNS:
        if example.get(column) in (None, [], "", {}):
            continue
        if column not in MEDIA or any(f"<{column}>" in text for text in texts):
            raise BadExample(f"column {column} holds what a run on {trained_on} would lose")
