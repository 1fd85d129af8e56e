"""Rows of one question and its answer, as Alpaca's, ms-swift's and those of captions, as turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chat.preference import PREFERENCE_COLUMNS
from data.splits.optional_columns import optional_text, read_history
from data.tokens.spans import BadExample

_ANSWERS = {
    "instruction": ("output", "response"),
    "query": ("response",),
    "question": ("answer", "response"),
    "prompt": ("response", "completion", "answer"),
}
"""Columns of answers by those of questions."""

_CAPTIONS = ("text", "caption", "txt")
_HISTORY = "history"
COLUMNS = (
    *_ANSWERS,
    *dict.fromkeys(name for names in _ANSWERS.values() for name in names),
    "input",
    *_CAPTIONS,
    _HISTORY,
)


def with_turns(example: Mapping[str, Any], columns: Sequence[str]) -> Mapping[str, Any]:
    """The row with turns in the first of `columns`, made of its question and answer; as it is if it has turns, or
    neither.

    Raises:
        BadExample: if its history is none.
    """
    if {*columns, *PREFERENCE_COLUMNS} & example.keys():
        return example
    for question, answers in _ANSWERS.items():
        answer = next((name for name in answers if isinstance(example.get(name), str)), None)
        if isinstance(example.get(question), str) and answer is not None:
            return {**example, columns[0]: _turns(example, question, answer)}
    caption = next((name for name in _CAPTIONS if isinstance(example.get(name), str)), None)
    if caption is None or not {"image", "images"} & example.keys():
        return example
    return {
        **example,
        columns[0]: [_turn("user", str(example.get("prompt") or "")), _turn("assistant", example[caption])],
    }


def missing_part(example: Mapping[str, Any]) -> str:
    """What a row lacks to be read as a question and its answer, or as an image and its text; "" if it has no part."""
    for question, answers in _ANSWERS.items():
        if isinstance(example.get(question), str) and question != "prompt":  # captions may have one, too
            return f"; its {question} has no {' or '.join(answers)}"
    image = next((name for name in ("image", "images") if name in example), None)
    caption = next((name for name in _CAPTIONS if name in example), None)
    if image is not None:
        return f"; its {image} has no {', '.join(_CAPTIONS[:-1])} or {_CAPTIONS[-1]}"
    return f"; its {caption} has no image" if caption is not None else ""


def _turns(example: Mapping[str, Any], question: str, answer: str) -> list[dict[str, str]]:
    text, subject = example[question], optional_text(example, "input") if question == "instruction" else ""
    if subject:
        text = f"{text}\n{subject}"
    earlier = [
        _turn(role, said) for pair in read_history(example, _HISTORY) for role, said in zip(_ROLES, pair, strict=True)
    ]
    return [*earlier, _turn("user", text), _turn("assistant", example[answer])]


_ROLES = ("user", "assistant")


def _turn(role: str, text: str) -> dict[str, str]:
    if not isinstance(text, str):
        raise BadExample(f"its {role}'s turn is not text but {type(text).__name__}")
    return {"role": role, "content": text}
