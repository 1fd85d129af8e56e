"""Kinds of turns: of two of a kind, a chat template that does not go by their words writes both alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from chat.lost_text import text_of, thoughts_of
from chat.turns import Message

_PLAIN = {str, int, float, bool, type(None)}


@dataclass
class KindOfTurn:
    """What is known of the turns of one kind."""

    num_checks: int = 0
    header: str | None = None  # from the turn's start to where it is learned; None if it is written otherwise there
    is_mixed: bool = False  # two of them differed


@dataclass
class KindsOfTurns:
    """What is known of the turns that a template writes."""

    kinds: dict[Hashable, KindOfTurn] = field(default_factory=dict)
    num_conversations: int = 0
    is_trusted: bool = True


def kinds_of(shapes: Sequence[Hashable], indices: Sequence[int], size: int, setting: Hashable) -> dict[int, Hashable]:
    """The kinds of some turns in a conversation of `size` messages: what they are like, and what stands around them."""
    before = list(accumulate(shapes[:size], _with, initial=frozenset[Hashable]()))
    after = list(accumulate(reversed(shapes[:size]), _with, initial=frozenset[Hashable]()))[::-1]
    padded = [None, *shapes[:size], None]
    return {index: (*padded[index : index + 3], before[index], after[index + 1], setting) for index in indices}


def _with(seen: frozenset[Hashable], shape: Hashable) -> frozenset[Hashable]:
    return seen if shape in seen else seen | {shape}


def shape_of(message: Message, words: Sequence[str]) -> Hashable:
    """What a template may ask about a message, its words left out but for those that the template looks for."""
    content, calls = text_of(message), message.get("tool_calls") or ()
    said = (content, *thoughts_of(message))
    return (
        *(message["role"], frozenset(key for key, value in message.items() if value), type(message["content"])),
        *(bool(content.strip()), content[:1].isspace(), content[-1:].isspace(), min(len(calls), 2)),
        frozenset(word for word in words if any(word in text for text in said)),
    )


def is_plain(value: Any) -> bool:
    """Whether a value is one of JSON's."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, Mapping):
        return all(type(key) in _PLAIN and is_plain(part) for key, part in value.items())
    return isinstance(value, list) and all(map(is_plain, value))
