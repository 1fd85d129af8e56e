"""On a GPU with deterministic kernels, a resumed run is bit-equal to an uninterrupted one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from run_folder.checkpoint_folder import checkpoints
from tests.helpers import random_documents
from tests.helpers.processes import run_command, train_events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

UNCOMPILED = ["--compile", "False"]
CASES = {
    "full": UNCOMPILED,
    "compiled": ["--compile", "--batching_strategy", "padding"],
    "bf16": ["--pure_bf16", *UNCOMPILED],
    "fp16": ["--use_fp16", *UNCOMPILED],
    "lora": ["--use_peft", "--lora_config.lora_dropout", "0.3", "--batching_strategy", "padding", *UNCOMPILED],
}


def train(model: Path, folder: Path, *flags: str) -> None:
    given = ["--model_name", str(model), "--output_dir", str(folder), "--context_length", "96", "--deterministic"]
    given += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    given += ["--batch_size_training", "2", "--max_train_step", "8", "--save_every_steps", "3", "--keep_last", "9"]
    done = run_command(*given, "--lr", "5e-3", *flags, real=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(
    case: str, tiny_model: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(tiny_model, whole, *CASES[case])
    shutil.copytree(whole, killed)
    for checkpoint in checkpoints(killed / "checkpoints")[:2]:
        shutil.rmtree(checkpoint)
    train(tiny_model, killed, *CASES[case], "--resume", "auto")
    for found, wanted in zip(train_events(killed), train_events(whole), strict=True):
        for name in ("step", "loss", "grad_norm", "lr"):
            assert found[name] == wanted[name], (wanted["step"], name)
    found, wanted = (load_file(next(run.glob("*/*model.safetensors"))) for run in (killed, whole))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
