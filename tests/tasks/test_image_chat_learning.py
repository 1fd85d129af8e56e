"""A tiny Qwen2-VL with random weights learns, from packed rows, to answer two questions in a row about two pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from data.batches.padding import EXACT
from data.processors.written_images import ImageWriter
from tasks.image_rows import RowsOfImages
from tasks.image_sample_batches import ImageSampleCollator
from tests.helpers.image_chats import chat_processor, read_chats, save_chat_model
from tests.helpers.image_models import COLOURS, COUNTS, SHAPES, draw
from tests.helpers.processes import run_command

NUM_TRAIN, NUM_HELD_OUT = 1200, 100


def write_questions(folder: Path, split: str, number: int, seed: int, *, swapped: bool = False) -> Path:
    """Pairs of pictures: the colour of the first is asked for, and then how many things the second shows."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, lines = np.random.default_rng(seed), []
    for row in range(number):
        shown = []
        for place in range(2):
            count, colour, shape = (int(generator.integers(3)), *map(generator.choice, (list(COLOURS), SHAPES)))
            file = f"{split}-{seed}-{row}-{place}.png"
            draw(count + 1, str(colour), str(shape), generator).save(folder / file)
            shown.append((file, str(colour), COUNTS[count]))
        (first, colour, _), (second, _, count) = shown
        says = [("user", "<image>"), ("assistant", colour), ("user", "<image>"), ("assistant", count)]
        turns = [{"role": role, "content": text} for role, text in says]
        lines.append(json.dumps({"messages": turns, "images": [second, first] if swapped else [first, second]}))
    table = folder / f"{split}.jsonl"
    table.write_text("\n".join(lines) + "\n")
    return table


@torch.no_grad()
def share_right(folder: Path, table: Path) -> float:
    """The share of conversations of which every learned token is the likeliest one."""
    processor: Any = chat_processor("chat_learner")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    collate = ImageSampleCollator(ImageWriter.of(processor), RowsOfImages(0, EXACT))
    right = []
    for sample in read_chats(processor, table):
        batch: Any = collate([[sample]])
        said = model(**batch.model_inputs()).logits.flatten(0, 1)[batch.target_positions].argmax(-1)
        right.append(torch.equal(said, batch.targets))
    return float(np.mean(right))


@pytest.mark.slow
@pytest.mark.long
def test_it_learns_two_questions_about_two_pictures_and_their_order(tmp_path: Path) -> None:
    model = save_chat_model("chat_learner", tmp_path / "model", scale=1.0)
    write_questions(tmp_path / "data", "train", NUM_TRAIN, seed=0)
    flags = ["--model_name", str(model), "--output_dir", str(tmp_path / "run"), "--dataset", "chat_dataset"]
    flags += ["--chat_dataset.data_path", str(tmp_path / "data"), "--run_validation", "False", "--seed", "1"]
    flags += ["--context_length", "256", "--num_epochs", "2", "--lr", "3e-3", "--scheduler", "cosine"]
    flags += ["--warmup_steps", "20", "--gradient_clipping", "--save_every_steps", "0", "--mixed_precision", "False"]
    done = run_command(*flags)
    assert done.returncode == 0, done.stderr
    assert "training rows are" in done.stdout  # packed ones

    held_out = write_questions(tmp_path / "held_out", "train", NUM_HELD_OUT, seed=1)
    swapped = write_questions(tmp_path / "swapped", "train", NUM_HELD_OUT, seed=1, swapped=True)
    in_order, in_other_order = (share_right(tmp_path / "run/model", table) for table in (held_out, swapped))
    assert in_order >= 0.9
    assert in_other_order < 0.5
    print(f"right {in_order:.2f}, with the pictures swapped {in_other_order:.2f}")
