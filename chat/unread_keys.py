"""Keys of turns that a chat template does not write, and that nothing here reads: what they say would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chat.conversation import Conversation
from chat.turn_keys import refuse_lost_meaning
from chat.turns import Message
from data.tokens.spans import BadExample

if TYPE_CHECKING:
    from chat.template import ChatTemplate

_CHECKED_ELSEWHERE = {"role", "content", "tool_calls", "reasoning_content", "thinking"}  # by chat.lost_text
_OF_CALLS = "tool_calls."


def unread_keys(conversation: Conversation, template: ChatTemplate) -> tuple[str, ...]:
    """The keys that are lost, each with the role of its turns: `name (user)`.

    Whether the template writes a key is tried once: the conversation is rendered with it and without.

    Raises:
        BadExample: if the meaning of one would change what is learned.
    """
    lost = set(conversation.unread_keys)
    for number, message in enumerate(conversation.messages, 1):
        for key, value in _more_keys(message):
            role = message["role"]
            if (role, key) not in template.writes:
                template.writes[role, key] = _writes(template, conversation, role, key)
            if template.writes[role, key]:
                continue
            try:
                is_lost = role != "assistant" or refuse_lost_meaning(key, value)
            except BadExample as error:
                if _writes(template, conversation, role, key):  # a template may write some of its values alone
                    continue
                raise BadExample(f"turn {number} (assistant): {error}") from error
            lost |= {f"{key} ({role})"} if is_lost else set()
    return tuple(sorted(lost))


def _more_keys(message: Message) -> list[tuple[str, Any]]:
    """The keys of a turn and of its calls that say something and that no one has read."""
    if message.keys() <= {"role", "content"}:
        return []
    found = [(key, value) for key, value in message.items() if key not in _CHECKED_ELSEWHERE]
    for call in message.get("tool_calls") or []:
        found += [(_OF_CALLS + key, value) for key, value in call.items() if key not in ("type", "function")]
    return [(key, value) for key, value in found if value not in ("", [], {})]


def _writes(template: ChatTemplate, conversation: Conversation, role: str, key: str) -> bool:
    """Whether the text differs without this key of the turns of a role."""
    messages = [_without(message, key) if message["role"] == role else message for message in conversation.messages]
    try:
        text = template.render(conversation, len(messages))
        return text != template.render(replace(conversation, messages=messages), len(messages))
    except BadExample:  # it does not take the turns without the key
        return True


def _without(message: Message, key: str) -> Message:
    if not key.startswith(_OF_CALLS):
        return {name: value for name, value in message.items() if name != key}
    calls = [_without_one(call, key.removeprefix(_OF_CALLS)) for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls} if calls else message


def _without_one(call: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != key}
