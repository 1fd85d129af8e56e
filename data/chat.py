"""Conversations through a chat template, as training samples in which the assistant's turns count in the loss.

A turn's loss begins where the template's generation prompt ends, and ends with the token that ends the turn. If the
template has `{% generation %}`, it marks the assistant's parts itself. Otherwise the conversation is rendered up to
each of the assistant's turns, once with the generation prompt and once with the turn: as the model meets it later.

Turns whose texts are beginnings of each other share a sample; with many templates that is the whole conversation.
Templates that rewrite history when more follows (most drop earlier thoughts) give several samples, as few as possible,
and each turn is learned in one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from data.chat_template import ChatTemplate
from data.conversation import Conversation
from data.loss_mask import BadExample, ChatSamples, MaskWay, TextSpan
from data.lost_text import (
    THOUGHTS,
    RenderedText,
    lost_from_answer,
    lost_from_history,
    lost_from_tools,
    text_of,
    thoughts_of,
)
from data.message_forms import with_json_arguments, with_null_content, with_parts
from data.turn_parts import Place, learned_places
from data.turns import Message

_PARTS_AS_TEXT = ("'type': 'text'", '"type": "text"')  # of a template that does not know parts
_PROBE = "\ue000"  # a private character: no text has it


@dataclass
class _Sample:
    """The text of a conversation's first messages, and where it holds the turns that are learned."""

    text: str
    num_messages: int
    places: dict[int, list[Place]] = field(default_factory=dict)  # of each turn, by its index


@dataclass(frozen=True)
class _Turn:
    """One of the assistant's turns, as the model meets it: the text up to its end."""

    index: int
    text: str
    places: list[Place]
    ends: list[int]  # where it may end, behind one end token or behind several; the last place ends at the first


def chat_samples(conversation: Conversation, template: ChatTemplate) -> ChatSamples:
    """A conversation's samples, as few as possible; every turn with a loss is learned in one of them.

    Raises:
        BadExample: if the template does not take the conversation, leaves out a part of it, or does not tell the
            assistant's part.
    """
    refusal = None
    for form, forbidden in _forms(conversation):
        try:
            samples, way = _samples(form, template)
            for sample in samples:
                _leave_out_parts(form, sample)
        except BadExample as error:
            # What is lost says more than an exception, but not in a form that most templates do not know.
            if refusal is None or (not error.__cause__ and not forbidden):
                refusal = error
            continue
        if not any(part in sample.text for sample in samples for part in forbidden):
            return ChatSamples([_spans(sample) for sample in samples], way, conversation.num_empty_answers)
    assert refusal is not None  # nothing is forbidden in the first form
    raise refusal


def _forms(conversation: Conversation) -> Iterator[tuple[Conversation, tuple[str, ...]]]:
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


def _samples(conversation: Conversation, template: ChatTemplate) -> tuple[list[_Sample], MaskWay]:
    has_marks = template.has_marks(conversation)
    if has_marks and (sample := _marked_whole(conversation, template)):
        return [sample], MaskWay.MARKS
    find = _marked_turn if has_marks else _prompted_turn
    turns = [find(conversation, template, index) for index, learned in enumerate(conversation.has_loss) if learned]
    samples = _shared(conversation, template, turns)
    for sample in samples:
        _check(conversation, sample, template)
    if has_marks:
        return samples, MaskWay.MARKS
    return samples, MaskWay.PROMPTS if len(samples) == 1 else MaskWay.TURNS


def _marked_whole(conversation: Conversation, template: ChatTemplate) -> _Sample | None:
    """The whole conversation, if the template marks each of the assistant's turns and drops nothing of them."""
    text, marks = template.render_marked(conversation, len(conversation.messages))
    indices = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not marks:
        raise BadExample("the chat template marks none of its turns with {% generation %}")
    if len(marks) != len(indices):
        return None
    sample = _Sample(text, len(conversation.messages))
    for index, (first, last) in zip(indices, marks, strict=True):
        if conversation.has_loss[index]:
            ends = _ends(text, first, last, template)
            if not ends:
                raise BadExample(_never_ends(index, template))
            sample.places[index] = [(first, ends[0])]
    try:
        _check(conversation, sample, template)
    except BadExample:
        if len(indices) == 1:
            raise
        return None
    return sample


def _marked_turn(conversation: Conversation, template: ChatTemplate, index: int) -> _Turn:
    """A turn as the template writes and marks it when it is the last."""
    text, marks = template.render_marked(conversation, index + 1)
    before = template.render(conversation, index, prompt=True) if index else ""
    shared = _length_shared(before, text)
    places = [mark for mark in marks if mark[1] > shared]
    if not places:
        raise BadExample(f"the chat template does not mark turn {index + 1} with {{% generation %}}")
    ends = _ends(text, *places[-1], template)
    if not ends:
        raise BadExample(_never_ends(index, template))
    return _Turn(index, text, [*places[:-1], (places[-1][0], ends[0])], ends[:1])


def _prompted_turn(conversation: Conversation, template: ChatTemplate, index: int) -> _Turn:
    """A turn from the end of the generation prompt on."""
    if index == 0:
        raise BadExample(
            f"it begins with the assistant's turn, where the chat template has no prompt; {template.mark_it}"
        )
    prompt = template.render(conversation, index, prompt=True)
    text, first = template.render(conversation, index + 1), len(prompt)
    if not text.startswith(prompt):
        text, first = _cut(conversation, template, index, prompt, text)
    ends = _ends(text, first, len(text), template)
    if not ends:
        text = text.rstrip() + _token_of_next_turn(conversation, template, index, text.rstrip())
        ends = [len(text)]
    return _Turn(index, text, [(first, ends[0])], ends)


def _cut(conversation: Conversation, template: ChatTemplate, index: int, prompt: str, text: str) -> tuple[str, int]:
    """The text to learn a turn in, and where the turn begins, if the generation prompt is no beginning of `text`.

    Some templates write history otherwise once a last turn follows: the turn is then put behind the prompt. Where it
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
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _last_turn(prompt: str, message: Message) -> str:
    """The end of a prompt, from the text of its last turn on; empty if that cannot be found."""
    text = text_of(message).strip()
    place = prompt.rfind(text) if text else -1
    return prompt[place:] if place >= 0 else ""


def _holds_turn_before(conversation: Conversation, index: int, text: str) -> bool:
    before = text_of(conversation.messages[index - 1]).strip()
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


def _ends(text: str, first: int, last: int, template: ChatTemplate) -> list[int]:
    """Where the turn text[first:last] may end: behind each of the special tokens at its end, the last first.

    White space behind them belongs to what follows.
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
    behind = before.rpartition(tail)[2] if tail else ""
    token = template.special_at_start(behind.lstrip())
    history, prompt = template.render(conversation, index), template.render(conversation, index, prompt=True)
    if token is None or not prompt.startswith(history) or token in prompt[len(history) :]:
        raise BadExample(_never_ends(index, template))
    return behind[: behind.index(token)] + token


def _never_ends(index: int, template: ChatTemplate) -> str:
    return f"the chat template ends turn {index + 1} with no end token, so answers would never end; {template.mark_it}"


def _shared(conversation: Conversation, template: ChatTemplate, turns: Sequence[_Turn]) -> list[_Sample]:
    """The fewest samples that hold all turns: a turn joins a sample that begins with the turn's text."""
    samples: list[_Sample] = []
    num_messages = len(conversation.messages)
    if not turns or turns[-1].index + 1 < num_messages:
        samples.append(_Sample(template.render(conversation, num_messages), num_messages))
    for turn in reversed(turns):
        for sample in samples:
            end = next((end for end in turn.ends if sample.text.startswith(turn.text[:end])), None)
            if end is not None:
                sample.places[turn.index] = [*turn.places[:-1], (turn.places[-1][0], end)]
                break
        else:
            samples.append(_Sample(turn.text, turn.index + 1, {turn.index: turn.places}))
    return [sample for sample in reversed(samples) if sample.places or not turns]


def _check(conversation: Conversation, sample: _Sample, template: ChatTemplate) -> None:
    """Check that the sample holds all that the conversation says, and that what is learned is the assistant's.

    Raises:
        BadExample: naming the turn, and what the template left out.
    """
    regions, position = [], 0
    for places in (sample.places[index] for index in sorted(sample.places)):
        regions.append(RenderedText(sample.text[position : places[0][0]]))
        position = places[-1][1]
    regions.append(RenderedText(sample.text[position:]))
    outside = regions[0] if len(regions) == 1 else RenderedText("\n".join(region.text for region in regions))
    region, said = 0, Counter[tuple[int, str]]()
    for index, message in enumerate(conversation.messages[: sample.num_messages]):
        if index in sample.places:
            learned = RenderedText("\n".join(sample.text[first:last] for first, last in sample.places[index]))
            lost = lost_from_answer(message, learned)
            region += 1
        elif conversation.has_loss[index]:
            continue  # it is learned in another sample
        else:
            lost = lost_from_history(message, regions[region])
            if lost and message["role"] in ("system", "developer"):  # which templates move
                lost = lost_from_history(message, outside)
            content = text_of(message).strip()
            said[region, content] += 1
            if not lost and said[region, content] > 1 and regions[region].count(content) < said[region, content]:
                lost = "text"
        if lost:
            raise BadExample(
                f"turn {index + 1} ({message['role']}): the chat template does not write its {lost}, which would be "
                f"lost; {template.write_it}"
            )
    if lost := lost_from_tools(conversation.tools, outside):
        raise BadExample(f"the chat template does not write {lost}, which would be lost; {template.write_it}")


def _leave_out_parts(conversation: Conversation, sample: _Sample) -> None:
    """Take the parts that are not learned out of the places of their turns."""
    for index, not_learned in conversation.not_learned.items():
        if index not in sample.places:
            continue
        message = conversation.messages[index]
        text, thoughts = text_of(message), "".join(thoughts_of(message))
        try:
            sample.places[index] = learned_places(
                sample.text, sample.places[index], text=text, thoughts=thoughts, not_learned=not_learned
            )
        except BadExample as error:
            raise BadExample(f"turn {index + 1}: {error}") from error


def _spans(sample: _Sample) -> list[TextSpan]:
    spans, position = [], 0
    for first, last in (place for index in sorted(sample.places) for place in sample.places[index]):
        spans += [TextSpan(sample.text[position:first], False), TextSpan(sample.text[first:last], True)]
        position = last
    return [*spans, TextSpan(sample.text[position:], False)]
