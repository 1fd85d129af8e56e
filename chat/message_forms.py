"""The forms in which chat templates take the same message: all templates take text, some only one of these."""

from __future__ import annotations

import json

from chat.turns import Message


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
