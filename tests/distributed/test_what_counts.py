"""Other losses than cross-entropy are those of a plain loop, however the batch is cut and the model is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from policies.embedding_noise import draw_of, noise_of, rows_of
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup
from tests.helpers.reference import SEED, assert_agrees, flags_for, reference_run

NUM_STEPS = 4


def dft(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    probabilities = logits.softmax(-1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    return (losses * probabilities.detach())[targets != -100].sum()


def noise(ids: torch.Tensor, size: int, step: int) -> torch.Tensor:
    return noise_of(rows_of(ids, None, None, ALPHA, draw_of(SEED, step)), size, torch.float32)


def adapter(init: Any) -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_alpha=32, init_lora_weights=init)


ALPHA = 5.0
CHANGES: dict[str, dict[str, Any]] = {
    "--loss_type dft": {"loss_of": dft},
    "--init_lora_weights pissa --use_peft": {"adapter": adapter("pissa")},
    "--init_lora_weights olora --use_peft": {"adapter": adapter("olora")},
    "--init_lora_weights orthogonal --use_peft --lora_dropout 0": {"adapter": adapter("orthogonal")},
    "--lr_ratio 4 --use_peft --lora_dropout 0": {"adapter": adapter(True), "lr_ratio": 4.0},
    f"--neftune_noise_alpha {ALPHA:g}": {"noise_of": noise},
}


@pytest.fixture(scope="module")
def references(tiny_model: Path) -> Made:
    def reference(flags: str, batching: str) -> list[tuple[float, float]]:
        return reference_run(tiny_model, batching=batching, num_steps=NUM_STEPS, **CHANGES[flags])

    return Made(reference)


@pytest.mark.parametrize(
    ("split", "batching"),
    [
        ((2, 1, 4), "packing"),
        pytest.param((1, 2, 4), "padding", marks=pytest.mark.slow),
        pytest.param((1, 8, 1), "packing", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("change", CHANGES)
def test_any_split_trains_as_the_plain_loop(
    change: str,
    split: tuple[int, int, int],
    batching: str,
    tiny_model: Path,
    references: Made,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    ranks, micro_batch, accumulation = split
    flags = flags_for(tiny_model, tmp_path / "run", batching=batching, num_steps=NUM_STEPS)
    flags += [*change.split(), "--loss_chunk_size", "50", "--save_model", "False", "--run_validation", "False"]
    flags += ["--batch_size_training", str(micro_batch), "--gradient_accumulation_steps", str(accumulation)]
    process_group.train([*flags, *(["--enable_fsdp"] if ranks > 1 else [])], ranks)
    assert_agrees(tmp_path / "run", references[change, batching])
