"""A tiny Qwen2-VL with random weights learns, from packed rows, to answer two questions in a row about two pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families.image_questions import shares_right, write_questions
from tests.helpers.image_chats import save_chat_model
from tests.helpers.processes import run_command

NUM_TRAIN, NUM_HELD_OUT = 1200, 100


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

    write_questions(tmp_path / "held_out", "validation", NUM_HELD_OUT, seed=1)
    write_questions(tmp_path / "swapped", "validation", NUM_HELD_OUT, seed=1, swapped=True)
    in_order, in_other_order = (shares_right(tmp_path / "run/model", tmp_path / of) for of in ("held_out", "swapped"))
    assert in_order.both >= 0.9
    assert in_other_order.both < 0.5
    print(f"right {in_order.both:.2f}, with the pictures swapped {in_other_order.both:.2f}")
