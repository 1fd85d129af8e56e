"""Conversations of many turns, whose cost would grow with the square of these if each turn were rendered by itself.

A conversation is rendered once, and marks in the template's loops tell where its turns begin (`chat.turn_starts`).
What a turn begins with, and whether it stands there as it does when it is the last, depends on its kind: on what it and
the turns around it hold, not on their words. So some turns of each kind are rendered by themselves, and all others of
the kind are taken alike. Some conversations are found in both ways, which must agree. Whatever is in doubt is rendered
turn by turn (`chat.rendered_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chat.conversation import Conversation
from chat.rendered_turns import Sample, prompted_turn, turn_ends
from chat.turn_kinds import KindOfTurn, KindsOfTurns, is_plain, kinds_of, shape_of
from chat.turn_parts import Place
from utils.printing import print_line

if TYPE_CHECKING:
    from chat.template import ChatTemplate
    from chat.turn_starts import RenderedStarts

MANY_TURNS = 8  # that are learned; up to here each is rendered by itself
_CHECKS_OF_A_KIND = 4
_WHOLE_AT_FIRST, _WHOLE_EVERY = 2, 512  # conversations that are found in both ways
_MOST_TURNS_CHECKED = 64  # that are learned; of a longer conversation its beginning is found in both ways
_TURN_EVERY = 8  # conversations of which one turn more is rendered by itself


class _InDoubtError(Exception):
    """A turn's place is not sure."""


def samples_by_kinds(
    conversation: Conversation,
    template: ChatTemplate,
    learned: Sequence[int],
    one_by_one: Callable[[Conversation, Sequence[int]], list[Sample]],
) -> list[Sample]:
    """The fewest samples that hold all turns that are learned.

    Args:
        learned: the indices of these turns, at least one.
        one_by_one: finds the same with each turn rendered by itself.
    """
    known = template.kinds
    known.num_conversations += 1
    if not known.is_trusted:
        return one_by_one(conversation, learned)
    try:
        samples = _find(conversation, template, learned)
        if known.num_conversations > _WHOLE_AT_FIRST and known.num_conversations % _WHOLE_EVERY:
            return samples
        if len(learned) <= _MOST_TURNS_CHECKED:
            checked = one_by_one(conversation, learned)
            if samples != checked:
                _distrust(known)
            return checked
        beginning, learned_there = _beginning(conversation, learned)
        if _find(beginning, template, learned_there) == one_by_one(beginning, learned_there):
            return samples
        _distrust(known)
    except _InDoubtError:
        pass
    return one_by_one(conversation, learned)


def _beginning(conversation: Conversation, learned: Sequence[int]) -> tuple[Conversation, Sequence[int]]:
    """The first turns of a conversation, and those of them that are learned."""
    learned = learned[:_MOST_TURNS_CHECKED]
    size = learned[-1] + 1
    return replace(conversation, messages=conversation.messages[:size], has_loss=conversation.has_loss[:size]), learned


def _distrust(known: KindsOfTurns) -> None:
    """Render every turn by itself from now on."""
    known.is_trusted = False
    if known.num_conversations > _WHOLE_AT_FIRST:
        print_line(
            "warning: the chat template writes two turns of the same kind differently; from here on each turn of long "
            "conversations is rendered by itself, and a label of an earlier one may be misplaced"
        )


def _find(conversation: Conversation, template: ChatTemplate, learned: Sequence[int]) -> list[Sample]:
    if not all(map(is_plain, conversation.messages)):  # transformers changes other values before it renders
        raise _InDoubtError
    shapes = [shape_of(message, template.words_read(conversation)) for message in conversation.messages]
    setting = bool(conversation.tools), repr(conversation.template_kwargs)
    remaining, samples, size = list(learned), list[Sample](), len(conversation.messages)
    number = template.kinds.num_conversations
    drawn = remaining[number * 7919 % len(remaining)] if number % _TURN_EVERY == 0 else None
    while remaining:
        if not (rendered := template.render_with_starts(conversation, size)):
            raise _InDoubtError
        sample = Sample(rendered.text, size)
        kinds = kinds_of(shapes, remaining, size, setting)
        ends = {kind: index for index, kind in kinds.items()}, {kind: index for index, kind in [*kinds.items()][::-1]}
        for index, kind in kinds.items():
            known = template.kinds.kinds.setdefault(kind, KindOfTurn())
            if known.is_mixed:
                raise _InDoubtError
            is_new = known.num_checks < _CHECKS_OF_A_KIND
            if index == drawn or (is_new and any(index == of[kind] for of in ends)):
                _check(known, conversation, template, rendered, index)
            if known.header is not None:
                sample.places[index] = [_place(rendered, template, index, known.header)]
        if size == remaining[-1] + 1 and remaining[-1] not in sample.places:
            raise _InDoubtError
        remaining = [index for index in remaining if index not in sample.places]
        size = remaining[-1] + 1 if remaining else 0
        samples += [sample] if sample.places else []
    return samples[::-1]


def _check(
    known: KindOfTurn, conversation: Conversation, template: ChatTemplate, rendered: RenderedStarts, index: int
) -> None:
    """Render a turn by itself, and note what that says of its kind.

    Raises:
        _InDoubtError: if another turn of the kind was written otherwise, or its marks tell another place.
        BadExample: if the assistant's part cannot be told.
    """
    turn = prompted_turn(conversation, template, index)
    text, start, first = rendered.text, rendered.starts[index], turn.places[0][0]
    end = next((end for end in turn.ends if text.startswith(turn.text[:end])), None)
    header = text[start:first] if end is not None and start <= first else None
    known.is_mixed |= (header is None) != (end is None) or (known.num_checks > 0 and known.header != header)
    if known.is_mixed and known.num_checks >= _CHECKS_OF_A_KIND:
        _distrust(template.kinds)
    if known.is_mixed or (header is not None and _place(rendered, template, index, header) != (first, end)):
        raise _InDoubtError
    known.header, known.num_checks = header, known.num_checks + 1


def _place(rendered: RenderedStarts, template: ChatTemplate, index: int, header: str) -> Place:
    """Where a turn is learned, from its header on and up to its end token.

    Raises:
        _InDoubtError: if it has no such header, or no end token.
    """
    text, starts = rendered
    start, stop = (*starts, len(text))[index : index + 2]
    ends = turn_ends(text, start + len(header), stop, template)
    if not (ends and text.startswith(header, start)):
        raise _InDoubtError
    return start + len(header), ends[0]
