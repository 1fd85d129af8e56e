"""Conversations of one turn about drawn pictures of many sizes, for benchmarks of models of images and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.images.opening import import_pillow

_CANDIDATES = ("the", "and", "to", "a", "I", "you", "is", "it", "for", "in", "of", "that", "we", "will", "be")


class PictureChats(NamedTuple):
    """What is drawn; each range is given by its least and its largest value.

    Attributes:
        sides: pixels.
        pictures: of a sample.
        answer: tokens of the answer.
    """

    sides: tuple[int, int]
    pictures: tuple[int, int]
    answer: tuple[int, int]


def write_picture_chats(folder: Path, chats: PictureChats, number: int, tokenizer: Any) -> None:
    """Write train.jsonl and its pictures, JPEG files, always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [word for word in _CANDIDATES if len(tokenizer(f"a {word}")["input_ids"]) == 2]
    generator, lines = np.random.default_rng(0), []
    for row in range(number):
        files = [f"{row}-{place}.jpg" for place in range(_drawn(generator, chats.pictures))]
        for file in files:
            _draw(folder / file, _drawn(generator, chats.sides), _drawn(generator, chats.sides), generator)
        question, answer = "What is in the picture?", " ".join(generator.choice(words, _drawn(generator, chats.answer)))
        messages = [
            {"role": "user", "content": "<image>" * len(files) + question},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages, "images": files}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def _drawn(generator: np.random.Generator, between: tuple[int, int]) -> int:
    return int(generator.integers(between[0], between[1] + 1))


def _draw(file: Path, width: int, height: int, generator: np.random.Generator) -> None:
    """Areas of soft colours with some grain, so that the file is about as large as a photograph's."""
    image_module = import_pillow()
    coarse = image_module.fromarray(generator.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    grain = image_module.fromarray(generator.integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8))
    soft, fine = (image.resize((width, height), image_module.Resampling.BILINEAR) for image in (coarse, grain))
    image_module.blend(soft, fine, 0.15).save(file, quality=90)
