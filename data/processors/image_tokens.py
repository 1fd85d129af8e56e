"""The tokens with which a processor marks the place of an image, and prompts that spell one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from data.images.placeholders import Placeholders
from data.processors.processor_loading import PLACE, blank_image, image_inputs, prompt_text
from utils.errors import in_one_line

_NAME = re.compile(r"(\w*(image|video|audio|vision)\w*|boi|eoi|boa|eoa)_token(_id)?")


def placeholders_of(processor: Any) -> Placeholders:
    """The tokens of a processor that stand for images, video and sound, or begin and end them."""
    tokens = _ImageTokens(processor)
    return Placeholders(tuple(tokens.texts), tokens.refusal_of_prompt)


class _ImageTokens:
    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.texts = dict(_found(processor))  # by id
        self._answers: dict[str, str | None] = {}

    def refusal_of_prompt(self, prompt: str) -> str | None:
        """Why the processor takes no image with a prompt. A prompt may say itself where its one image is."""
        if prompt.count(PLACE) > 1 and PLACE not in self.texts.values():
            return f"its prompt has {PLACE} {prompt.count(PLACE)} times, and a caption has one image"
        spelled = next((text for text in self.texts.values() if text in prompt), None)
        if spelled is None:
            return None
        if prompt not in self._answers:
            self._answers[prompt] = self._refusal(prompt, spelled)
        return self._answers[prompt]

    def _refusal(self, prompt: str, spelled: str) -> str | None:
        try:
            counts = self._counts(prompt)
        except Exception as error:  # each processor has its own
            return f"its prompt spells {spelled}, which stands for an image ({in_one_line(error)})"
        same = counts == self._counts_of_one
        return None if same else f"its prompt spells {spelled}, which would stand for one more image"

    @cached_property
    def _counts_of_one(self) -> list[int]:
        return self._counts("")

    def _counts(self, prompt: str) -> list[int]:
        """How often each of the tokens is among the inputs of one image."""
        ids = image_inputs(self.processor, blank_image(), prompt_text(self.processor, prompt))["input_ids"]
        return [int(torch.sum(ids == token)) for token in self.texts]


def _found(processor: Any) -> Iterator[tuple[int, str]]:
    tokenizer = processor.tokenizer
    known = {**tokenizer.special_tokens_map, **vars(processor)}
    for name, value in known.items():
        if not _NAME.fullmatch(name):
            continue
        text = value if isinstance(value, int) and not isinstance(value, bool) else getattr(value, "content", value)
        number = tokenizer.convert_tokens_to_ids(text) if isinstance(text, str) else text
        spelling = tokenizer.convert_ids_to_tokens(number) if isinstance(number, int) else None
        if isinstance(spelling, str) and spelling != tokenizer.unk_token:
            yield number, spelling
