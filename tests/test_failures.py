"""A run that fails for a reason nobody foresaw: every process ends, and the error is shown once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import read_metrics, run_command

RECIPE = """
import os
import torch

def planted(*args, **kwargs):
    raise RuntimeError("a planted failure")

if os.environ["RANK"] in RANKS:
    torch.nn.functional.cross_entropy = planted

def get_rows(dataset_config, tokenizer, split):
    return [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["01", "1"])
def test_an_unforeseen_error_is_shown_once_and_ends_all_ranks(ranks: str, tiny_model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.replace("RANKS", repr(ranks)))
    flags = ["--model_name", str(tiny_model), "--dataset", f"{recipe}:get_rows", "--run_validation", "False"]
    flags += ["--output_dir", str(tmp_path / "run"), "--batching_strategy", "padding", "--num_workers_dataloader", "0"]
    done = run_command(*flags, nproc=2, timeout_seconds=120)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].endswith("RuntimeError: a planted failure")
    assert ("rank 1: " in errors[0]) == (ranks == "1")
    assert done.stderr.count("in planted") == 1, "the traceback, once"
    if ranks == "01":
        assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"
