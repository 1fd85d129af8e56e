"""Where one of the assistant's turns begins and ends in a conversation's text, as its chat template writes it.

A turn begins where the generation prompt ends, or where the template marks it, and ends with the token that ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from chat.conversation import Conversation
from chat.lost_text import THOUGHTS, longest_text
from chat.turn_parts import Place
from chat.turns import Message
from data.tokens.spans import BadExample

if TYPE_CHECKING:
    from chat.template import ChatTemplate

_PROBE = "\ue000"  # a private character: no text has it


@dataclass
class Sample:
    """The text of a conversation's first messages, and where it holds the turns that are learned."""

    text: str
    num_messages: int
    places: dict[int, list[Place]] = field(default_factory=dict)  # of each turn, by its index


@dataclass(frozen=True)
class RenderedTurn:
    """One of the assistant's turns, as the model meets it: the text up to its end."""

    index: int
    text: str
    places: list[Place]
    ends: list[int]  # where it may end, after one end token or after several; the last place ends at the first


def marked_turn(conversation: Conversation, template: ChatTemplate, index: int) -> RenderedTurn:
    """A turn as the template writes and marks it when it is the last.

    Raises:
        BadExample: if the template does not mark it, or never ends it.
    """
    text, marks = template.render_marked(conversation, index + 1)
    before = template.render(conversation, index, prompt=True) if index else ""
    shared = _length_shared(before, text)
    places = [mark for mark in marks if mark[1] > shared]
    if not places:
        raise BadExample(f"the chat template does not mark turn {index + 1} with {{% generation %}}")
    ends = turn_ends(text, *places[-1], template)
    if not ends:
        raise BadExample(never_ends(index, template))
    return RenderedTurn(index, text, [*places[:-1], (places[-1][0], ends[0])], ends[:1])


def prompted_turn(conversation: Conversation, template: ChatTemplate, index: int) -> RenderedTurn:
    """A turn from the end of the generation prompt on.

    Raises:
        BadExample: if there is no prompt before it, the assistant's part cannot be told, or the template never ends it.
    """
    if index == 0:
        raise BadExample(
            f"it begins with the assistant's turn, where the chat template has no prompt; {template.mark_it}"
        )
    prompt = template.render(conversation, index, prompt=True)
    text, first = template.render(conversation, index + 1), len(prompt)
    if not text.startswith(prompt):
        text, first = _cut(conversation, template, index, prompt, text)
    ends = turn_ends(text, first, len(text), template)
    if not ends:
        text = text.rstrip() + _token_of_next_turn(conversation, template, index, text.rstrip())
        ends = [len(text)]
    return RenderedTurn(index, text, [(first, ends[0])], ends)


def _cut(conversation: Conversation, template: ChatTemplate, index: int, prompt: str, text: str) -> tuple[str, int]:
    """The text to learn a turn in, and where the turn begins, if the generation prompt is no beginning of `text`.

    Some templates write history otherwise once a last turn follows: the turn is then put after the prompt. Where it
    begins is found by the header that the prompt adds or, if it adds none (Mistral), by the turn before it. Others have
    a prompt that the finished turn does not repeat (an open thought): there the turn begins where the two part.
    """
    history = template.render(conversation, index)
    probed = [*conversation.messages[:index], _probe(conversation.messages[index])]
    other = template.render(replace(conversation, messages=probed), index + 1)
    own = _length_shared(text, other)  # where the turn's own words begin
    header = prompt.removeprefix(history) or _last_turn(prompt, conversation.messages[index - 1])
    place = text.rfind(header, 0, own) if header and header != prompt else -1
    if place >= 0 and not _holds_turn_before(conversation, index, text[place + len(header) : own]):
        return prompt + text[place + len(header) :], len(prompt)
    parting = _length_shared(prompt, text)
    if not (header and parting > len(history) and text.startswith(history)):
        raise BadExample(
            f"the chat template writes what stands before turn {index + 1} otherwise than its generation prompt, so "
            f"the assistant's part cannot be told; {template.mark_it}"
        )
    return text, min(parting, own)


def _length_shared(one: str, other: str) -> int:
    """Characters of the beginning that two texts share."""
    shared, most = 0, min(len(one), len(other))
    while shared < most:  # halving compares in C; one character at a time took most of the time of a long conversation
        middle = (shared + most + 1) // 2
        if one[shared:middle] == other[shared:middle]:
            shared = middle
        else:
            most = middle - 1
    return shared


def _last_turn(prompt: str, message: Message) -> str:
    """The end of a prompt, from the text of its last turn on; empty if that cannot be found."""
    text = longest_text(message)
    place = prompt.rfind(text) if text else -1
    return prompt[place:] if place >= 0 else ""


def _holds_turn_before(conversation: Conversation, index: int, text: str) -> bool:
    before = longest_text(conversation.messages[index - 1])
    return bool(before) and before in text


def _probe(message: Message) -> Message:
    """The turn with other words."""
    changed = {key: _PROBE for key in ("content", *THOUGHTS) if message.get(key)}
    if not message.get("tool_calls"):
        return {**message, "content": _PROBE, **changed}
    calls = []
    for call in message["tool_calls"]:
        function = {**call.get("function", call), "name": _PROBE}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, **changed, "tool_calls": calls}


def turn_ends(text: str, first: int, last: int, template: ChatTemplate) -> list[int]:
    """Where the turn text[first:last] may end: after each of the special tokens at its end, the last first.

    White space after them belongs to what follows.
    """
    ends, rest = [], text[first:last].rstrip()
    while token := template.special_at_end(rest):
        ends.append(first + len(rest))
        rest = rest.removesuffix(token).rstrip()
    return ends


def _token_of_next_turn(conversation: Conversation, template: ChatTemplate, index: int, text: str) -> str:
    """The token that ends a turn without an end token: the one with which only another's turn begins (GLM-4).

    Args:
        text: the conversation up to the end of the turn.

    Raises:
        BadExample: if there is none.
    """
    following = conversation.messages[index + 1 : index + 2]
    if not following or following[0]["role"] == "assistant":
        following = [{"role": "user"}]
    messages = [*conversation.messages[: index + 1], {**following[0], "content": _PROBE}]
    before = template.render(replace(conversation, messages=messages), index + 2).partition(_PROBE)[0]
    # History may be written otherwise, so the end of the turn is found by as much of its last words as is the same.
    tail = next((text[-size:] for size in (64, 16, 4) if text[-size:] in before), None)
    after = before.rpartition(tail)[2] if tail else ""
    token = template.special_at_start(after.lstrip())
    history, prompt = template.render(conversation, index), template.render(conversation, index, prompt=True)
    if token is None or not prompt.startswith(history) or token in prompt[len(history) :]:
        raise BadExample(never_ends(index, template))
    return after[: after.index(token)] + token


def never_ends(index: int, template: ChatTemplate) -> str:
    """The message for a turn without an end token."""
    return f"the chat template ends turn {index + 1} with no end token, so answers would never end; {template.mark_it}"
