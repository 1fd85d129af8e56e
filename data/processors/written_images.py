"""What a processor writes for images: the text in the place of each, and the model's inputs of their pixels.

A chat template writes one placeholder for an image, and the processor replaces it by as many tokens as the image's size
asks for. That text is caught where the processor hands it to its tokenizer, so no family's rule is written down here.
Blank images stand for real ones: the text depends on sizes alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data.images.placeholders import Placeholders
from data.images.shapes import Size
from data.processors.image_tokens import placeholders_of
from data.processors.processor_loading import blank_image
from data.processors.tokenizer_loading import special_ids
from utils.chat_rendering import render_chat
from utils.errors import ConfigError, in_one_line

TEXT_INPUTS = (
    *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"),
    *("cross_attention_mask", "image_attention_mask"),  # the images that each token sees: Llama 3.2 Vision, Idefics
)
"""The inputs that have a value for each token; all others belong to the images."""

_TYPES = ("token_type_ids", "mm_token_type_ids")
_BETWEEN = "\n|\n"  # images of a trial
_TRIED: tuple[Size, Size] = ((96, 64), (64, 160))
_COUNTED: tuple[Size, ...] = (*_TRIED, (33, 250), (417, 301), (700, 500))
_MOST_KEPT = 4096  # texts by sizes


class _WrittenError(Exception):
    """Ends a processor's work once its text is known."""


@dataclass
class _Catcher:
    """Stands for a processor's tokenizer, and catches the text that it is given."""

    tokenizer: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tokenizer"], name)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        raise _WrittenError(text if isinstance(text, str) else text[0])


@dataclass(frozen=True)
class ImageWriter:
    """A processor that replaces placeholders by the tokens of images."""

    processor: Any
    placeholder: str  # that a chat template writes for an image
    token: str  # the token whose places the features of images take
    token_id: int
    types: tuple[tuple[str, int], ...]  # inputs that tell image tokens from text, and their value at an image token
    are_apart: bool  # an image's text does not depend on the other images of a sample
    placeholders: Placeholders = field(repr=False)
    around: tuple[str, str] | None = (
        None  # of each image's text, which else is `token` as often as the processor counts
    )
    _texts: dict[tuple[Size, ...], tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, processor: Any) -> ImageWriter:
        """The writer of a processor whose chat template writes placeholders.

        Raises:
            ConfigError: if it has none, writes none, or puts images elsewhere than in the text.
        """
        family = type(processor).__name__
        template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
        if not template:
            raise ConfigError(
                f"--dataset: the processor ({family}) has no chat template, and conversations are written by one; give "
                "--dataset caption_dataset, or one with --chat_dataset.chat_template FILE"
            )
        placeholders = placeholders_of(processor)
        placeholder = _placeholder(processor, template, placeholders)
        if placeholder is None:
            raise ConfigError(
                f"--dataset: the chat template writes nothing for an image that the processor ({family}) reads as one; "
                "give another with --chat_dataset.chat_template FILE"
            )
        inputs = _inputs(processor, placeholder, [blank_image(_TRIED[0])])
        if found := [name for name in TEXT_INPUTS[4:] if name in inputs]:
            raise ConfigError(
                f"--dataset: this model's text sees images through {found[0]}, and such models learn captions alone; "
                "give --dataset caption_dataset"
            )
        ids = inputs["input_ids"][0].tolist()
        special = special_ids(processor.tokenizer)
        ((token_id, _),) = Counter([token for token in ids if token in special] or ids).most_common(1)
        place = ids.index(token_id)
        types = tuple((name, int(inputs[name][0, place])) for name in _TYPES if name in inputs)
        token = processor.tokenizer.convert_ids_to_tokens(token_id)
        pair = _written(processor, placeholder, _TRIED)
        are_apart = pair == tuple(text for size in _TRIED for text in _written(processor, placeholder, [size]))
        around = _around(processor, placeholder, token) if are_apart else None
        return cls(processor, placeholder, token, token_id, types, are_apart, placeholders, around)

    def cache_key(self) -> str:
        """All that its texts depend on: the processor's settings, those of its images included."""
        plain = {name: value for name, value in vars(self.processor).items() if isinstance(value, str | int | float)}
        of_images = self.processor.image_processor.to_json_string()
        return repr([type(self.processor).__name__, sorted(plain.items()), of_images, self.placeholder, self.token])

    def texts(self, sizes: Sequence[Size]) -> tuple[str, ...]:
        """The text of each image of a sample, by its width and height.

        Raises:
            Exception: whatever the processor raises for a size that it refuses.
        """
        if self.are_apart and len(sizes) > 1:
            return tuple(text for size in sizes for text in self.texts([size]))
        key = tuple(sizes)
        if key not in self._texts:
            if len(self._texts) >= _MOST_KEPT:
                self._texts.clear()
            self._texts[key] = self._text_of(*key) if len(key) == 1 else self._written(sizes)
        return self._texts[key]

    def _text_of(self, size: Size) -> tuple[str, ...]:
        if self.around is None:
            return self._written([size])
        before, after = self.around
        return (f"{before}{self.token * _counted(self.processor, size)}{after}",)

    def _written(self, sizes: Sequence[Size]) -> tuple[str, ...]:
        return _written(self.processor, self.placeholder, sizes)

    def num_tokens(self, text: str) -> int:
        """How many features stand in an image's text."""
        return text.count(self.token)

    def pixel_inputs(self, images: Sequence[Any]) -> tuple[dict[str, torch.Tensor], int]:
        """The model's inputs of the images of one sample, without those that have a value for each token; and how many
        features they become.

        Raises:
            Exception: whatever the processor raises.
        """
        inputs = _inputs(self.processor, _BETWEEN.join([self.placeholder] * len(images)), images)
        num_features = int((inputs["input_ids"] == self.token_id).sum())
        return {name: value for name, value in inputs.items() if name not in TEXT_INPUTS}, num_features

    def refusal_of(self, size: Size) -> str | None:
        """Why the processor takes no image of this size; None if it does."""
        try:
            self.texts([size])
        except Exception as error:  # each processor has its own
            return in_one_line(error)
        return None


def _around(processor: Any, placeholder: str, token: str) -> tuple[str, str] | None:
    """What an image's text has around its tokens, if the processor's own count of these is right for all trials.

    To count takes microseconds, to make the inputs of an image of three million pixels nearly a second.
    """
    found = set()
    try:
        for size in _COUNTED:
            (text,) = _written(processor, placeholder, [size])
            parts = text.split(token * _counted(processor, size))
            if len(parts) != 2 or token in "".join(parts):
                return None
            found.add((parts[0], parts[1]))
    except Exception:  # it does not count, or refuses one of them
        return None
    return found.pop() if len(found) == 1 else None


def _counted(processor: Any, size: Size) -> int:
    """The tokens of an image by the processor's own arithmetic, which vLLM plans with, too.

    Raises:
        Exception: if it has none, or refuses the size.
    """
    width, height = size
    (number,) = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"]
    return int(number)


def _placeholder(processor: Any, template: str, placeholders: Placeholders) -> str | None:
    """The token in a rendered user's turn that the processor takes for the place of an image."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    try:
        text = render_chat(template, [message], processor.tokenizer, **processor.tokenizer.special_tokens_map)[0][0]
    except Exception as error:  # a template may do anything
        raise ConfigError(
            f"--dataset: the chat template does not take a turn with an image ({in_one_line(error)}); give another "
            "with --chat_dataset.chat_template FILE"
        ) from error
    known = processor.tokenizer.convert_ids_to_tokens(list(placeholders.ids))
    first = getattr(processor, "image_token", None)
    first = getattr(first, "content", first)
    for token in dict.fromkeys([first, *known]):
        if isinstance(token, str) and text.count(token) == 1 and _replaces(processor, token):
            return token
    return None


def _replaces(processor: Any, token: str) -> bool:
    """Whether the processor reads this token as the place of an image: two of them are the places of two."""
    try:
        return len(_written(processor, token, _TRIED)) == len(_TRIED)
    except Exception:  # each processor has its own way to refuse
        return False


def _written(processor: Any, placeholder: str, sizes: Sequence[Size]) -> tuple[str, ...]:
    """The processor's text for each of these images.

    Raises:
        Exception: whatever the processor raises; ValueError if it writes no text of its own for each.
    """
    catching = copy.copy(processor)
    catching.tokenizer = _Catcher(processor.tokenizer)
    around = f"{_BETWEEN}{_BETWEEN.join([placeholder] * len(sizes))}{_BETWEEN}"
    try:
        _inputs(catching, around, [blank_image(size) for size in sizes])
    except _WrittenError as written:
        parts: list[str] = written.args[0].split(_BETWEEN)
        if len(parts) != len(sizes) + 2 or parts[0].strip() or parts[-1].strip() or not all(parts[1:-1]):
            raise ValueError("the processor does not write images where their placeholders are") from None
        return tuple(parts[1:-1])
    raise ValueError("the processor writes no text for images")


def _inputs(processor: Any, text: str, images: Sequence[Any]) -> dict[str, torch.Tensor]:
    inputs = processor(images=[list(images)], text=[text], return_tensors="pt", add_special_tokens=False)
    return {name: value for name, value in inputs.items() if torch.is_tensor(value) and name != "labels"}
