"""Conversations through a chat template, as training samples in which the assistant's turns count in the loss.

A turn's loss begins where the template's generation prompt ends, and ends with the token that ends the turn. If the
template has `{% generation %}`, it marks the assistant's parts itself. Otherwise the conversation is rendered up to
each of the assistant's turns, once with the generation prompt and once with the turn: as the model meets it later. For
conversations of many turns that is done for some of each kind (`chat.long_conversations`).

Turns whose texts are beginnings of each other share a sample; with many templates that is the whole conversation.
Templates that rewrite history when more follows (most drop earlier thoughts) give several samples, as few as possible,
and each turn is learned in one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chat.conversation import Conversation
from chat.images import count_images
from chat.long_conversations import MANY_TURNS, samples_by_kinds
from chat.lost_text import (
    RenderedText,
    longest_text,
    lost_from_answer,
    lost_from_history,
    lost_from_tools,
    text_of,
    thoughts_of,
)
from chat.message_forms import forms
from chat.rendered_turns import RenderedTurn, Sample, marked_turn, never_ends, prompted_turn, turn_ends
from chat.turn_parts import learned_places
from chat.unread_keys import unread_keys
from data.tokens.spans import BadExample, ChatSamples, MaskWay, TextSpan, UnboundedExample

if TYPE_CHECKING:
    from chat.template import ChatTemplate


def chat_samples(conversation: Conversation, template: ChatTemplate) -> ChatSamples:
    """A conversation's samples, as few as possible; every turn with a loss is learned in one of them.

    Raises:
        BadExample: if the template does not take the conversation, leaves out a part of it, or does not tell the
            assistant's part.
    """
    refusal = None
    marked = template.with_special_as_text(conversation)
    for form, forbidden in forms(marked):
        try:
            samples, way = _samples(form, template)
            if marked is not conversation:
                template.check_special_as_text(form)
            for sample in samples:
                _leave_out_parts(form, sample)
        except UnboundedExample:
            raise
        except BadExample as error:
            # What is lost says more than an exception, but not in a form that most templates do not know.
            if refusal is None or (not error.__cause__ and not forbidden):
                refusal = error
            continue
        if not any(part in sample.text for sample in samples for part in forbidden):
            lost = unread_keys(form, template)
            spans = [_spans(sample) for sample in samples]
            num_images = [count_images(conversation.messages[: sample.num_messages]) for sample in samples]
            return ChatSamples(spans, way, conversation.num_empty_answers, lost, num_images)
    assert refusal is not None  # nothing is forbidden in the first form
    raise refusal


def _samples(conversation: Conversation, template: ChatTemplate) -> tuple[list[Sample], MaskWay]:
    has_marks = template.has_marks(conversation)
    if has_marks and (sample := _marked_whole(conversation, template)):
        return [sample], MaskWay.MARKS
    find = marked_turn if has_marks else prompted_turn
    learned = [index for index, has_loss in enumerate(conversation.has_loss) if has_loss]

    def one_by_one(conversation: Conversation, learned: Sequence[int]) -> list[Sample]:
        return _shared(conversation, template, [find(conversation, template, index) for index in learned])

    is_long = len(learned) > MANY_TURNS and not has_marks
    if is_long:
        samples = samples_by_kinds(conversation, template, learned, one_by_one)
    else:
        samples = one_by_one(conversation, learned)
    for sample in samples:
        _check(conversation, sample, template)
    if has_marks:
        return samples, MaskWay.MARKS
    return samples, MaskWay.PROMPTS if len(samples) == 1 else MaskWay.TURNS


def _marked_whole(conversation: Conversation, template: ChatTemplate) -> Sample | None:
    """The whole conversation, if the template marks each of the assistant's turns and drops nothing of them."""
    text, marks = template.render_marked(conversation, len(conversation.messages))
    indices = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not marks:
        raise BadExample("the chat template marks none of its turns with {% generation %}")
    if len(marks) != len(indices):
        return None
    sample = Sample(text, len(conversation.messages))
    for index, (first, last) in zip(indices, marks, strict=True):
        if conversation.has_loss[index]:
            ends = turn_ends(text, first, last, template)
            if not ends:
                raise BadExample(never_ends(index, template))
            sample.places[index] = [(first, ends[0])]
    try:
        _check(conversation, sample, template)
    except BadExample:
        if len(indices) == 1:
            raise
        return None
    return sample


def _shared(conversation: Conversation, template: ChatTemplate, turns: Sequence[RenderedTurn]) -> list[Sample]:
    """The fewest samples that hold all turns: a turn joins a sample that begins with the turn's text."""
    samples: list[Sample] = []
    num_messages = len(conversation.messages)
    if not turns or turns[-1].index + 1 < num_messages:
        samples.append(Sample(template.render(conversation, num_messages), num_messages))
    for turn in reversed(turns):
        for sample in samples:
            end = next((end for end in turn.ends if sample.text.startswith(turn.text[:end])), None)
            if end is not None:
                sample.places[turn.index] = [*turn.places[:-1], (turn.places[-1][0], end)]
                break
        else:
            samples.append(Sample(turn.text, turn.index + 1, {turn.index: turn.places}))
    return [sample for sample in reversed(samples) if sample.places or not turns]


def _check(conversation: Conversation, sample: Sample, template: ChatTemplate) -> None:
    """Check that the sample holds all that the conversation says, and that what is learned is the assistant's.

    Raises:
        BadExample: naming the turn, and what the template left out.
    """
    if template.image is not None:
        _check_images(conversation, sample, template)
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
            content = longest_text(message)
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


def _check_images(conversation: Conversation, sample: Sample, template: ChatTemplate) -> None:
    """Check that the template writes one placeholder for each image, and that no text spells one.

    Raises:
        BadExample: if not.
    """
    assert template.image is not None
    num_images, num_written = (
        count_images(conversation.messages[: sample.num_messages]),
        sample.text.count(template.image),
    )
    if num_written > num_images:
        raise BadExample(
            f"its text spells {template.image}, which would stand for one more image; take it out of the row, or let "
            "it be text (--split_special_tokens)"
        )
    if num_written < num_images:
        raise BadExample(
            f"the chat template writes {num_written} of its {num_images} images, so others would be lost; "
            f"{template.write_it}"
        )


def _leave_out_parts(conversation: Conversation, sample: Sample) -> None:
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


def _spans(sample: Sample) -> list[TextSpan]:
    spans, position = [], 0
    for first, last in (place for index in sorted(sample.places) for place in sample.places[index]):
        spans += [TextSpan(sample.text[position:first], False), TextSpan(sample.text[first:last], True)]
        position = last
    return [*spans, TextSpan(sample.text[position:], False)]
