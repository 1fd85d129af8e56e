"""The text of an example in parts, each with a loss or without. Importing this costs nothing: files of datasets/ do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class BadExample(ValueError):
    """Why an example cannot be used; whoever reads the examples adds its row."""


class UnboundedExample(BadExample):
    """An example that takes too long, or too much memory, so that it is not tried in other ways."""


class TextSpan(NamedTuple):
    """A part of an example's text, and whether its tokens count in the loss."""

    text: str
    has_loss: bool


class MaskWay(StrEnum):
    """How the assistant's turns of a conversation were found; the values are names of counts of `Sequences`."""

    MARKS = "num_by_marks"  # by the template's own marks
    PROMPTS = "num_by_prompts"  # after its generation prompts, in one sample
    TURNS = "num_by_turns"  # the same in several samples, since the template rewrites history


class ChatSamples(NamedTuple):
    """The samples of a conversation, or of another text that holds its start and end tokens."""

    spans: Sequence[Sequence[TextSpan]]
    way: MaskWay | None  # None: the row itself says what is learned
    num_empty_answers: int = 0  # that have no loss because they are empty
    unread_keys: tuple[str, ...] = ()  # of its turns: what they say is lost
    num_images: Sequence[int] = ()  # of each sample: the first of the conversation's
    image_tokens: Sequence[int] = ()  # of each image of each sample, the tokens that stand for it
    images: Sequence[Any] = ()  # where each is (`data.images.opening.ImageSource`)
