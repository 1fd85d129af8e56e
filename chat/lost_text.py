"""What a chat template leaves out or rewrites: each part of a conversation is looked for in the rendered text.

The assistant's words must stand as they were put. In others' turns white space may differ, and text may be written as
JSON; JSON may have other separators, line breaks and order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from chat.images import texts_between
from chat.turns import Message

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_START_OF_THOUGHTS, _END_OF_THOUGHTS = "<think>", "</think>"


class RenderedText:
    """A rendered text to look in."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _words(self) -> str:
        return " ".join(self.text.split())

    @cached_property
    def _without_space(self) -> str:
        return "".join(self.text.split())

    def has(self, part: str) -> bool:
        """Whether a text is in it, as it is or as JSON."""
        part = part.strip()
        return part in self.text or self._written(part) in self.text or " ".join(part.split()) in self._words

    def has_in_order(self, parts: Sequence[str]) -> bool:
        """Whether texts are in it as they are, one after another, with at most white space between them."""
        return re.search(r"\s*".join(map(re.escape, parts)), self.text) is not None

    def count(self, part: str) -> int:
        """How often a text is in it."""
        part = part.strip()
        return self.text.count(part) or self.text.count(self._written(part)) or self.has(part)

    def has_json(self, value: Any) -> bool:
        """Whether a value is in it, as JSON or part by part; never in Python's own form."""
        if json.dumps(value, ensure_ascii=False) in self.text:
            return True
        return not any(self._is_python(part) for part in _containers(value)) and all(
            self._has_leaf(leaf) for leaf in _leaves(value)
        )

    def _is_python(self, value: Any) -> bool:
        written = repr(value)
        return written in self.text and written != json.dumps(value, ensure_ascii=False)

    def _has_leaf(self, leaf: Any) -> bool:
        if isinstance(leaf, str):
            return not leaf.strip() or self.has(leaf) or json.dumps(leaf)[1:-1] in self.text
        return json.dumps(leaf) in self.text or str(leaf) in self.text

    @staticmethod
    def _written(part: str) -> str:
        return json.dumps(part, ensure_ascii=False)[1:-1]


def lost_from_answer(message: Message, text: RenderedText) -> str | None:
    """The first part of the assistant's turn that is not in its rendered text: what it is called; None if all is."""
    if any(thought.strip() not in text.text for thought in thoughts_of(message)):
        return "thoughts"
    return _lost_answer(message, text) or _lost_calls(message, text)


def lost_from_history(message: Message, text: RenderedText) -> str | None:
    """The same for any other turn; of the assistant's earlier turns templates may drop the thoughts."""
    return _lost_content(message, text) or _lost_calls(message, text)


def lost_from_tools(tools: list[Any] | None, text: RenderedText) -> str | None:
    """The first tool of which a name or a description is not in the text."""
    for tool in tools or []:
        if json.dumps(tool, ensure_ascii=False) in text.text:
            continue
        for part in _said_by_tool(tool):
            if not text.has(part):
                return f"{part.strip()[:40]!r} of the tools"
    return None


def thoughts_of(message: Message) -> list[str]:
    """The assistant's thoughts, if they are apart from the content."""
    return [message[key] for key in THOUGHTS if isinstance(message.get(key), str)][:1]


def text_of(message: Message) -> str:
    """A turn's content as text; parts are joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))


def longest_text(message: Message) -> str:
    """The longest text of a turn that no image interrupts."""
    return max(texts_between(text_of(message)) or [""], key=len).strip()


def _lost_answer(message: Message, text: RenderedText) -> str | None:
    """What is lost of the assistant's own words: they stand as they were put, but for white space around them."""
    lost = (_lost_words(content.strip(), text) for content in texts_between(text_of(message)))
    return next(filter(None, lost), None)


def _lost_words(content: str, text: RenderedText) -> str | None:
    if content in text.text:
        return None
    if (parts := _thoughts_and_answer(content)) is None:
        return "text as it is" if text.has(content) or content.rpartition(_END_OF_THOUGHTS)[2] in text.text else "text"
    thoughts, answer = parts
    start = [_START_OF_THOUGHTS] if content.startswith(_START_OF_THOUGHTS) else []
    if text.has_in_order([part for part in (*start, thoughts, _END_OF_THOUGHTS, answer) if part]):
        return None
    return "thoughts" if answer in text.text else "text"


def _lost_content(message: Message, text: RenderedText) -> str | None:
    """What is lost of a turn that is not learned; of the assistant's, templates may drop the thoughts."""
    for content in texts_between(text_of(message)):
        if text.has(content):
            continue
        parts = _thoughts_and_answer(content.strip()) if message["role"] == "assistant" else None
        if not (parts and text.has(parts[1])):
            return "text"
    return None


def _thoughts_and_answer(content: str) -> tuple[str, str] | None:
    """Thoughts that a content begins with, and what follows them; None if `</think>` is but a word in it.

    They stand in `<think>...</think>`, or end with a line `</think>`, as if the generation prompt had opened them. From
    other text before `</think>` a template would make thoughts, which is another answer.
    """
    thoughts, end, answer = content.partition(_END_OF_THOUGHTS)
    has_line = thoughts.endswith("\n") and answer.startswith("\n")
    if not end or _END_OF_THOUGHTS in answer or not (has_line or content.startswith(_START_OF_THOUGHTS)):
        return None
    return thoughts.removeprefix(_START_OF_THOUGHTS).strip(), answer.strip()


def _lost_calls(message: Message, text: RenderedText) -> str | None:
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        name, arguments = function.get("name", ""), function.get("arguments")
        if isinstance(arguments, str):
            is_there = arguments.strip() in text.text
        else:
            is_there = not arguments or text.has_json(arguments)
        if not (text.has(str(name)) and is_there):
            return f"call of {name}"
    return None


def _containers(value: Any) -> Iterator[Any]:
    """The dicts and lists in a value, itself included, that Python writes otherwise than JSON."""
    if isinstance(value, Mapping | list) and value:
        yield value
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _containers(part)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _said_by_tool(value: Any) -> Iterator[str]:
    """Names and descriptions: of a tool, of its parameters, and of theirs."""
    if isinstance(value, list):
        for part in value:
            yield from _said_by_tool(part)
    if not isinstance(value, Mapping):
        return
    for key, part in value.items():
        if key in ("name", "description") and isinstance(part, str):
            yield part
        elif key == "properties" and isinstance(part, Mapping):
            yield from part.keys()
            yield from _said_by_tool(list(part.values()))
        elif isinstance(part, Mapping | list):
            yield from _said_by_tool(part)
