"""How many tokens an image and its prompt take before a caption, known from the image's size: no pixel is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.images.shapes import Size
from data.processors.processor_loading import blank_image, image_inputs, num_end_tokens, prompt_text


def tokens_before_captions(processor: Any, sizes: Sequence[Size], prompts: Sequence[str]) -> np.ndarray:
    """The tokens of each row without its caption, int64 [rows].

    Prompts and images add up: the tokens of an image stand between special ones.

    Args:
        sizes: width and height of each row's image.

    Raises:
        Exception: whatever the processor raises.
    """
    of_size, plain = _by_size(processor, sorted(set(sizes))), _num_text_tokens(processor, "")
    of_prompt = {prompt: _num_text_tokens(processor, prompt) - plain for prompt in set(prompts)}
    end = num_end_tokens(processor.tokenizer)
    rows = zip(sizes, prompts, strict=True)
    return np.array([of_size[size] + of_prompt[prompt] - end for size, prompt in rows], dtype=np.int64)


def _num_text_tokens(processor: Any, prompt: str) -> int:
    """Tokens of the text before a caption, with one placeholder for the image."""
    return len(processor.tokenizer(prompt_text(processor, prompt), add_special_tokens=False)["input_ids"])


def _by_size(processor: Any, sizes: Sequence[Size]) -> dict[Size, int]:
    """The tokens of a blank image of each size, without a prompt.

    Processors count an image's tokens by a rule of theirs, for servers. It is taken if it holds for the smallest, the
    largest, the narrowest and the middle size; else each size is tried, which takes 5 to 100 ms.
    """
    tried = {size: _num_tokens(processor, size) for size in _extremes(sizes)}
    counted = _by_rule(processor, sizes)
    if counted is not None and len({tried[size] - counted[size] for size in tried}) == 1:
        besides = tried[sizes[0]] - counted[sizes[0]]
        return {size: number + besides for size, number in counted.items()}
    return {size: tried[size] if size in tried else _num_tokens(processor, size) for size in sizes}


def _extremes(sizes: Sequence[Size]) -> set[Size]:
    by_area = sorted(sizes, key=lambda size: size[0] * size[1])
    by_shape = sorted(sizes, key=lambda size: size[0] / size[1])
    return {sizes[0], *(found[place] for found in (by_area, by_shape) for place in (0, len(sizes) // 2, -1))}


def _num_tokens(processor: Any, size: Size) -> int:
    return int(image_inputs(processor, blank_image(size), prompt_text(processor, ""))["input_ids"].shape[1])


def _by_rule(processor: Any, sizes: Sequence[Size]) -> dict[Size, int] | None:
    try:
        found = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in sizes])
        return dict(zip(sizes, found.num_image_tokens, strict=True))
    except Exception:  # there is none, or it asks for what only servers have
        return None
