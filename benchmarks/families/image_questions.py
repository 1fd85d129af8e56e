"""Two questions in a row about two drawn pictures: the colour of the first, and how many things the second shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText

from benchmarks.families.image_chats import read_validation
from data.batches.padding import EXACT
from data.processors.processor_loading import read_processor
from data.processors.written_images import ImageWriter
from tasks.image_rows import RowsOfImages
from tasks.image_sample_batches import ImageSampleCollator

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 40),
    "white": (245, 245, 245),
    "purple": (140, 40, 160),
}
SHAPES, COUNTS = ("circle", "square", "triangle"), ("one", "two", "three")
CHANCE = 1 / (len(COLOURS) * len(COUNTS))
"""The share of conversations of which a guess has both answers right."""
SIDE = 32  # pixels


class SharesRight(NamedTuple):
    """The shares of answers that a model holds most likely, 0 to 1: of the first, of the second, and of both."""

    colour: float
    number: float
    both: float


def draw(count: int, colour: str, shape: str, generator: np.random.Generator) -> Image.Image:
    """So many shapes side by side on black, each moved and sized a little at random."""
    image = Image.new("RGB", (SIDE, SIDE))
    canvas = ImageDraw.Draw(image)
    for place in range(count):
        radius = generator.uniform(3.5, 5)
        x, y = (place + 0.5) * SIDE / count + generator.uniform(-0.5, 0.5), generator.uniform(8, SIDE - 8)
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            canvas.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            canvas.rectangle(box, fill=COLOURS[colour])
        else:
            canvas.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLOURS[colour])
    return image


def write_questions(folder: Path, split: str, number: int, seed: int, *, swapped: bool = False) -> Path:
    """Write so many conversations, with the pictures of each. Returns the JSON file.

    Args:
        swapped: the two pictures of a conversation change places, and the answers stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator, lines = np.random.default_rng(seed), list[str]()
    for row in range(number):
        shown = []
        for place in range(2):
            count, colour, shape = (int(generator.integers(3)), *map(generator.choice, (list(COLOURS), SHAPES)))
            file = f"{split}-{seed}-{row}-{place}.png"
            draw(count + 1, str(colour), str(shape), generator).save(folder / file)
            shown.append((file, str(colour), COUNTS[count]))
        (first, asked, _), (second, _, number_shown) = shown
        says = [("user", "<image>"), ("assistant", asked), ("user", "<image>"), ("assistant", number_shown)]
        turns = [{"role": role, "content": text} for role, text in says]
        lines.append(json.dumps({"messages": turns, "images": [second, first] if swapped else [first, second]}))
    table = folder / f"{split}.jsonl"
    table.write_text("\n".join(lines) + "\n")
    return table


@torch.no_grad()
def shares_right(model_folder: Path, data: Path) -> SharesRight:
    """What transformers' model of the folder answers to the conversations in `validation.jsonl`.

    An answer is right if each of its tokens is the likeliest after those before it.
    """
    torch.set_num_threads(1)
    processor: Any = read_processor(str(model_folder), "--model_name")
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    collate = ImageSampleCollator(ImageWriter.of(processor), RowsOfImages(0, EXACT))
    right = []
    samples: Any = read_validation(processor, data)
    for sample in samples:
        batch: Any = collate([[sample]])
        said = model(**batch.model_inputs()).logits.flatten(0, 1)[batch.target_positions].argmax(-1)
        is_right, starts = (said == batch.targets).tolist(), batch.target_positions.diff(prepend=torch.tensor([-2])) > 1
        second = int(starts.nonzero()[1])
        right.append((all(is_right[:second]), all(is_right[second:])))
    first, last = np.array(right).T
    return SharesRight(float(first.mean()), float(last.mean()), float((first & last).mean()))
