"""Tokens that stand for images: data that spells one would promise the model another image."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Placeholders(NamedTuple):
    """What a processor writes in the place of an image."""

    ids: tuple[int, ...]  # of its tokens, which no caption may hold
    refusal_of_prompt: Callable[[str], str | None]
    """Why the processor takes no image with this prompt; None if it does."""


NO_PLACEHOLDERS = Placeholders((), lambda prompt: None)
