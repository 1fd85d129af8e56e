"""The forms in which chat templates take the same message: all templates take text, some only one of these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from chat.conversation import Conversation
from chat.turns import Message

_PARTS_AS_TEXT = ("'type': 'text'", '"type": "text"')  # of a template that does not know parts


def forms(conversation: Conversation) -> Iterator[tuple[Conversation, tuple[str, ...]]]:
    """The conversation in the forms that templates take, the usual one first, and what must not be in the text."""
    usual = [
        message if message.get("content") is not None else {**message, "content": ""}
        for message in conversation.messages
    ]
    of_calls = (False, True) if any(message.get("tool_calls") for message in usual) else (False,)
    for has_parts, has_null, has_json in product((False, True), of_calls, of_calls):
        messages = [with_json_arguments(message) for message in usual] if has_json else usual
        messages = [with_parts(message) for message in messages] if has_parts else messages
        messages = [with_null_content(message) for message in messages] if has_null else messages
        yield replace(conversation, messages=messages), _PARTS_AS_TEXT if has_parts else ()


def with_json_arguments(message: Message) -> Message:
    """The turn with the arguments of its tool calls as JSON text, for templates that add them to text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str | None):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def with_parts(message: Message) -> Message:
    """The turn with its content as a list of parts, for templates of models that take images, too."""
    if not isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def with_null_content(message: Message) -> Message:
    """A turn of tool calls alone with null as its content, as OpenAI's API gives it (DeepSeek)."""
    return {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message
