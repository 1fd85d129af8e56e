"""The text that leads to an answer: turns as the chat template shows them, up to where the assistant's begins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chat.conversation import Conversation
from chat.message_forms import forms
from data.tokens.spans import BadExample, UnboundedExample

if TYPE_CHECKING:
    from chat.template import ChatTemplate


def prompt_of(conversation: Conversation, template: ChatTemplate) -> str:
    """The turns as text, with stand-ins in the special tokens that they spell (`data.tokens.special_text`).

    Raises:
        BadExample: if the template does not take the turns.
    """
    refusal = None
    for form, forbidden in forms(template.with_special_as_text(conversation)):
        try:
            text = template.render(form, len(form.messages), prompt=True)
        except UnboundedExample:
            raise
        except BadExample as error:
            refusal = refusal or error  # that of the usual form
            continue
        if not any(part in text for part in forbidden):
            return text
    assert refusal is not None  # nothing is forbidden in the first form
    raise refusal


def without_last_answer(conversation: Conversation) -> Conversation:
    """The turns before the last one if that is the assistant's, else all: those that the next answer follows."""
    if conversation.messages[-1]["role"] != "assistant":
        return conversation
    return replace(conversation, messages=conversation.messages[:-1], has_loss=conversation.has_loss[:-1])
