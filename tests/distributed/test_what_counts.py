"""Other losses than cross-entropy are those of a plain loop, however the batch is cut and the model is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from policies.embedding_noise import draw_of, noise_of, rows_of
from tests.helpers import random_documents
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup
from tests.helpers.reference import SEED, assert_agrees, flags_for, reference_run
from tests.helpers.resuming import SHARDED, as_if_killed_after, assert_bit_equal, flags_of

NUM_STEPS = 4


Document = Mapping[str, Any]


def dft(logits: torch.Tensor, targets: torch.Tensor, document: Document) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    probabilities = logits.softmax(-1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    return (losses * probabilities.detach())[targets != -100].sum()


def weighted(logits: torch.Tensor, targets: torch.Tensor, document: Document) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    return (losses * torch.tensor(document["token_weights"][1:])).sum() * document["sample_weight"]


def taught(logits: torch.Tensor, targets: torch.Tensor, document: Document) -> torch.Tensor:
    """Cross-entropy, and by 0.3 the divergence over the teacher's three tokens and all others as one."""
    total = 0.7 * weighted(logits, targets, document)
    for place in (targets != -100).nonzero().flatten().tolist():
        ids = torch.tensor(document["teacher_ids"][place + 1])
        shares = torch.tensor(document["teacher_logprobs"][place + 1]).exp()
        own = logits[place].softmax(-1)[ids]
        teacher, student = (torch.cat([part, 1 - part.sum().view(1)]) for part in (shares, own))
        divergence = (teacher * (teacher.log() - student.log())).sum()
        total = total + 0.3 * divergence * document["token_weights"][place + 1] * document["sample_weight"]
    return total


def noise(ids: torch.Tensor, size: int, step: int) -> torch.Tensor:
    return noise_of(rows_of(ids, None, None, ALPHA, draw_of(SEED, step)), size, torch.float32)


def adapter(init: Any) -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_alpha=32, init_lora_weights=init)


ALPHA = 5.0
CHANGES: dict[str, dict[str, Any]] = {
    "--loss_type dft": {"loss_of": dft},
    "--teacher_weight 0": {"loss_of": weighted, "documents": "get_taught_documents"},
    "--teacher_weight 0.3": {"loss_of": taught, "documents": "get_taught_documents"},
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
        pytest.param((1, 8, 1), "packing", marks=pytest.mark.full),
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
    documents = CHANGES[change].get("documents", "get_custom_dataset")
    flags = flags_for(tiny_model, tmp_path / "run", batching=batching, num_steps=NUM_STEPS, documents=documents)
    flags += [*change.split(), "--loss_chunk_size", "50", "--save_model", "False", "--run_validation", "False"]
    flags += ["--batch_size_training", str(micro_batch), "--gradient_accumulation_steps", str(accumulation)]
    process_group.train([*flags, *(["--enable_fsdp"] if ranks > 1 else [])], ranks)
    assert_agrees(tmp_path / "run", references[change, batching])


EVERYTHING = ["--use_peft", "--init_lora_weights", "pissa", "--lr_ratio", "4", "--neftune_noise_alpha", "5"]
EVERYTHING += ["--loss_type", "dft", "--teacher_weight", "0.3", "--run_validation", "False"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_all_of_it_that_is_killed_and_resumed_is_the_run_left_alone(
    ranks: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    documents = ["--dataset", f"{random_documents.__file__}:get_taught_documents"]
    given = [*documents, *EVERYTHING, *(SHARDED if ranks > 1 else [])]
    process_group.train(flags_of(tiny_model, tmp_path / "whole", *given), ranks)
    killed = as_if_killed_after(3, tmp_path / "whole", tmp_path / "killed")
    process_group.train(flags_of(tiny_model, killed, *given, "--resume", "auto"), ranks)
    assert_bit_equal(killed, tmp_path / "whole")
