"""JSON as it is written: a number keeps its spelling where it may become text, and no key is given twice."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 60
"""Of nested lists and objects. What comes after the reader recurses: templates, Python's json, Arrow."""


class WrittenNumber(float):
    """A number whose text is that of the file: 1.10, 1e5."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> WrittenNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.text,)


class DoubledKeyError(ValueError):
    """An object gives a key twice, of which one value would be lost."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DoubledKeyError(f"the key {twice} is given twice")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once)


def decode_row(text: str) -> Any:
    """The value of a JSON text. Numbers right in it keep their spelling; those further inside are no text.

    Raises:
        ValueError: if it is none, or gives a key twice (DoubledKeyError).
        RecursionError: if it is nested too deeply.
    """
    return with_spelling(text, DECODER.decode(text))


def with_spelling(text: str, row: Any) -> Any:
    """The value of a JSON text, with the spelling of the numbers right in it."""
    if type(row) is dict and any(type(value) is float for value in row.values()):
        written = json.loads(text, parse_float=WrittenNumber, parse_constant=WrittenNumber)
        return {key: written[key] if type(value) is float else value for key, value in row.items()}
    return row


def parse_json(text: str) -> Any:
    """The value of JSON text that a row holds: of turns, tools, the arguments of a call.

    Raises:
        ValueError: if it is none, is nested too deeply, gives a key twice, or has a number that is not finite.
    """
    try:
        value = json.loads(text, object_pairs_hook=_each_key_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    refuse_unwritable(value)
    return value


def refuse_unwritable(value: Any, depth: int = 0) -> None:
    """Refuse what a template could not write as JSON.

    Raises:
        ValueError: if it holds NaN or Infinity (1e999 is read as such), or is nested too deeply.
    """
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise ValueError(f"it is nested too deeply: {MAX_DEPTH} lists and objects in each other are the most")
        for item in value.values() if isinstance(value, dict) else value:
            refuse_unwritable(item, depth + 1)
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError(f"it holds the number {value}, which JSON cannot write")
