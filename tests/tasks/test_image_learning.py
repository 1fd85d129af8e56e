"""A tiny BLIP-2 with random weights learns to say what generated pictures show: how many, which colour, which shape."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.helpers.image_models import COLOURS, captioned, save_image_model, save_pictures
from tests.helpers.processes import run_command

NUM_TRAIN, NUM_HELD_OUT = 1000, 200


@pytest.mark.slow
def test_it_learns_to_caption_pictures(tmp_path: Path) -> None:
    model = save_image_model("learner", tmp_path / "model", scale=1.0)
    save_pictures(tmp_path / "pictures", NUM_TRAIN, seed=0)
    flags = ["--model_name", str(model), "--output_dir", str(tmp_path / "run"), "--dataset", "caption_dataset"]
    flags += ["--caption_dataset.data_path", str(tmp_path / "pictures"), "--run_validation", "False"]
    flags += ["--batch_size_training", "32", "--num_epochs", "5", "--lr", "3e-3", "--scheduler", "cosine"]
    done = run_command(*flags, "--warmup_steps", "20", "--gradient_clipping", "--save_every_steps", "0")
    assert done.returncode == 0, done.stderr

    processor = AutoProcessor.from_pretrained(tmp_path / "run/model", backend="pil")
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run/model").eval()
    held_out = captioned(NUM_HELD_OUT, seed=1)
    inputs = processor(images=[image for image, _ in held_out], text=[""] * NUM_HELD_OUT, return_tensors="pt")
    with torch.no_grad():
        output = trained.generate(**inputs, max_new_tokens=10, pad_token_id=processor.tokenizer.eos_token_id)
    said = [
        text.strip()
        for text in processor.tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    ]
    shown = [text for _, text in held_out]
    colours = [next((word for word in text.split() if word in COLOURS), "") for text in said]
    num_right_colours = sum(colour == text.split()[1] for colour, text in zip(colours, shown, strict=True))
    num_exact = sum(a == b for a, b in zip(said, shown, strict=True))
    ((_, num_of_commonest),) = Counter(shown).most_common(1)
    assert num_right_colours >= 0.9 * NUM_HELD_OUT
    assert num_exact >= 3 * num_of_commonest
    print(f"colour {num_right_colours}, exact {num_exact}, the commonest caption {num_of_commonest} of {NUM_HELD_OUT}")
