"""Runs that are killed and resumed, and how they are compared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from run_folder.checkpoint_folder import checkpoints
from tests.helpers import random_documents
from tests.helpers.processes import train_events

NUM_STEPS = 8
SHARDED = ["--enable_fsdp"]
PLAIN = ["--run_validation", "False"]


def flags_of(model: Path, output: Path, *flags: str) -> list[str]:
    """Four rows a step and a checkpoint every third, unless the flags say otherwise."""
    defaults = {
        "--model_name": str(model),
        "--output_dir": str(output),
        "--dataset": f"{random_documents.__file__}:get_custom_dataset",
        "--num_workers_dataloader": "0",
        "--context_length": "96",
        "--batch_size_training": "1",
        "--global_batch_size": "4",
        "--lr": "5e-3",
        "--max_train_step": str(NUM_STEPS),
        "--save_every_steps": "3",
        "--keep_last": "9",
    }
    return [*(word for flag, value in defaults.items() if flag not in flags for word in (flag, value)), *flags]


def as_if_killed_after(step: int, run: Path, folder: Path) -> Path:
    """What lies on the disk when a run was killed some time after its checkpoint of this step."""
    shutil.copytree(run, folder)
    for checkpoint in checkpoints(folder / "checkpoints"):
        if not checkpoint.name.endswith(f"{step:08d}"):
            shutil.rmtree(checkpoint)
    (folder / f"checkpoints/step-{step + 3:08d}.incomplete").mkdir()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-2]) + lines[-2][:30])
    return folder


def results(run: Path) -> list[tuple[Any, ...]]:
    """What a step came to, without its times."""
    names = ("step", "epoch", "loss", "grad_norm", "lr", "num_tokens", "loss_scale")
    return [tuple(event.get(name) for name in names) for event in train_events(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "model" if (run / "model").exists() else run / "adapter"
    return load_file(next(folder.glob("*.safetensors")))


def assert_bit_equal(run: Path, wanted: Path) -> None:
    assert results(run) == results(wanted)
    found, expected = weights(run), weights(wanted)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
