"""The whole table of docs/families.md: `benchmarks.family_losses`, and models of image and text.

    python -m tests.helpers.family_table --output losses.jsonl

The tests have the tiny processors that models of image and text need. Their samples are captions of three images. A
call measures the families that the file lacks. The exit status is 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.families.measured_losses import Cell, compare
from benchmarks.family_losses import FamilyRow, measure_missing, print_table, read_rows
from data.batches.padding import PaddedWidth
from data.images.caption_rows import Picture
from data.images.sequences import CaptionedImage
from data.processors.processor_loading import read_processor
from policies.loss.summed_loss import use_summed_loss
from tasks.image_text import ImageText
from tasks.task import BatchForm
from tests.helpers.image_models import MODELS, captioned, save_image_model, save_pictures
from tests.helpers.image_reference import PROMPT, example_of, own_loss
from utils.errors import ConfigError, in_one_line

NUM_IMAGES = 3


class Drawn:
    """The pictures of `captioned`, as a data set's."""

    def open(self, place: int) -> Picture:
        return Picture(captioned(NUM_IMAGES)[place][0], PROMPT)

    def describe(self, place: int, reason: Exception) -> str:
        return f"image {place}: {reason}"


def measure_images(name: str) -> FamilyRow:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return FamilyRow("image-text", name, {"padding": _measure(name, Path(folder))})
    except ConfigError as error:
        return FamilyRow("image-text", name, {"padding": Cell(refused=str(error))})
    except Exception as error:
        cell = Cell(error=f"{type(error).__name__}: {in_one_line(error)}")
        return FamilyRow("image-text", name, {"padding": cell})


def _measure(name: str, folder: Path) -> Cell:
    save_image_model(name, folder / "model")
    save_pictures(folder / "pictures", NUM_IMAGES)
    processor, task = read_processor(str(folder / "model"), "--model_name"), ImageText()
    plain, model = (
        AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval() for _ in range(2)
    )
    task.check_config(model.config, name)
    task.check_model(model, name)
    tokenizer = processor.tokenizer
    captions = [
        tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        for _, text in captioned(NUM_IMAGES)
    ]
    use_summed_loss(model, task.backbone(model), 16, task.compute_logits)
    form = BatchForm(len(tokenizer), (PaddedWidth(1, 256),), packing=False, offsets="none")
    collate = task.make_collator(processor, model.config, form)
    rows = []
    for place, caption in enumerate(captions):
        ids = np.array(caption, dtype=np.int32)
        rows.append([CaptionedImage(ids, ids, place, Drawn(), place)])  # type: ignore[arg-type]
    own = []
    for place, caption in enumerate(captions):
        inputs, labels = example_of(processor, model.config, folder / f"pictures/train-{place}.png", caption)
        inputs = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
        with torch.no_grad():
            own.append(float(own_loss(plain, inputs, labels)))
    tried = sorted(rows[:2], key=lambda row: len(row[0].labels))
    return compare(model, task, collate, rows, list(map(len, captions)), own, tried=tried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a JSON line for each family")
    output = parser.parse_args().output
    measure_missing(output, ())
    there = {row.family for row in read_rows(output) if row.kind == "image-text"}
    for name in [name for name in MODELS if name not in there]:
        with output.open("a") as file:
            file.write(json.dumps(asdict(measure_images(name))) + "\n")
    rows = read_rows(output)
    print_table(rows)
    sys.exit(any(not row.is_right for row in rows))


if __name__ == "__main__":
    main()
