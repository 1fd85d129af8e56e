"""Rows as other tools have them, written for these tests: turns, calls, answers, and what is learned of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

END, EOS = "<|im_end|>", "</s>"


@dataclass(frozen=True)
class Format:
    """A file's rows; what is learned of each row, in the parts that stand together. None if it is refused."""

    rows: list[dict[str, Any]]
    learned: list[list[str]] | None = field(default=None)


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def model(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def sharegpt(*texts: str) -> list[dict[str, Any]]:
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def taken(*learned: str, end: str = END, **row: Any) -> Format:
    """A row of which these texts are learned, each with the end token."""
    return Format([row], [[text + end for text in learned]])


def refused(**row: Any) -> Format:
    return Format([row])


CALL = {"name": "weather", "arguments": {"city": "Lima"}}
CALL_AS_TEXT = {"name": "weather", "arguments": json.dumps(CALL["arguments"])}
CALLED = f"<tool_call>{json.dumps(CALL)}</tool_call>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "name": "weather", "content": "dry"}

ASKED, SAID = [user("Sky?")], [model("Blue.")]
ANSWERED, WRONG = [user("Sky?"), model("Blue.")], [user("Sky?"), model("Green.")]
CHAT = [user("Sky?"), model("Blue."), user("Sea?"), model("Blue, too.")]
SHAREGPT = sharegpt("Sky?", "Blue.", "Sea?", "Blue, too.")
TASK = {"instruction": "Name it.", "input": "the sky's colour"}
RANKED: dict[str, Any] = {"chosen": "Blue.", "rejected": "Green."}
EARLIER = [["Hi", "Hello."], ["Sun?", "Yellow."]]


def labelled(good: dict[str, Any], bad: dict[str, Any], label: str = "label") -> Format:
    """A good row and a bad one, of which nothing is learned."""
    return Format([good | {label: True}, bad | {label: False}], [[f"Blue.{END}"], []])


ALPACA = {**TASK, "output": "Blue."}
