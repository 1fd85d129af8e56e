"""What a row says: its turns, tools and settings, in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.datasets import ChatDataset
from data.loss_mask import BadExample

TURN_COLUMNS = ("messages", "conversations")

Message = dict[str, Any]

# ShareGPT's `from` as the roles that templates know.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them; which of them count in the loss."""

    messages: list[Message]  # role, content (text), tool_calls, ...
    has_loss: tuple[bool, ...]  # of each message; only the assistant's may
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # of the template, beside messages and tools


def columns_to_read(config: ChatDataset) -> tuple[str, ...]:
    """The columns that `read_conversation` looks for."""
    return (*turn_columns(config), config.tools_column)


def turn_columns(config: ChatDataset) -> tuple[str, ...]:
    """The columns that may hold the turns."""
    return (config.messages_column,) if config.messages_column else TURN_COLUMNS


def read_conversation(example: Mapping[str, Any], config: ChatDataset) -> Conversation:
    """The conversation of a row.

    Args:
        example: the row's columns, of those that `columns_to_read` names.

    Raises:
        BadExample: if it is no conversation, or no turn of the assistant's has a loss.
    """
    turns = next((example[column] for column in turn_columns(config) if column in example), None)
    messages = _read_turns(turns)
    tools = _read_tools(example.get(config.tools_column))
    has_loss = tuple(message["role"] == "assistant" for message in messages)
    if not any(has_loss):
        raise BadExample("it has no assistant turn, so there are no label tokens")
    return Conversation(messages, has_loss, tools)


def _read_turns(turns: Any) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise BadExample("it needs a list of turns, each with role and content (or from and value)")
    return [_read_turn(number, turn) for number, turn in enumerate(turns, 1)]


def _read_turn(number: int, turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise BadExample(f"turn {number} is not a dict with role and content but {type(turn).__name__}")
    message = _without_nulls(turn)
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _ROLES:
            raise BadExample(f"turn {number} is from {speaker!r}; known are {', '.join(_ROLES)}")
        message = {"role": _ROLES[speaker], "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise BadExample(f"turn {number} has no role")
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return message
    if not isinstance(content, str | list):
        raise BadExample(f"turn {number} ({message['role']}) has no text in content")
    return message


def _without_nulls(value: Any) -> Any:
    """Drop the keys that are null: Arrow gives each dict of a column the keys of all of them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _read_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadExample(f"its tools are no JSON ({error})") from error
        except RecursionError as error:
            raise BadExample("its tools are nested too deeply") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadExample(f"its tools are not a list but {type(tools).__name__}")
    return _without_nulls(tools)
