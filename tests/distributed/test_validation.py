"""Evaluation: one number for the whole validation set, however many ranks share it and however it is batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.helpers import random_documents
from tests.helpers.pairwise import select, select_product
from tests.helpers.processes import ProcessGroup, read_metrics

CONTEXT_LENGTH = 64
DOCUMENTS = random_documents.get_custom_dataset(None, None, "validation")  # 13, no multiple of any batch below


def evals(group: ProcessGroup, model: Path, folder: Path, ranks: int, *flags: str) -> list[dict[str, Any]]:
    """The `eval` events: before training, and after one step."""
    argv = ["--model_name", str(model), "--output_dir", str(folder), "--save_model", "False"]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--context_length", str(CONTEXT_LENGTH)]
    argv += ["--num_workers_dataloader", "0", "--max_train_step", "1", "--eval_before_training", "--lr", "1e-2"]
    argv += ["--batch_size_training", "1", "--global_batch_size", "4", *flags]
    group.train(argv, ranks)
    return [event for event in read_metrics(folder) if event["event"] == "eval"]


def plain_eval(model_folder: Path, documents: list[dict[str, list[int]]]) -> tuple[float, int]:
    """Mean loss per label token, one document at a time, and their number."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for document in documents:
            logits = model(input_ids=torch.tensor([document["input_ids"]])).logits[0, :-1]
            targets = torch.tensor(document["labels"][1:])
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            count += int((targets != -100).sum())
    return total / count, count


CASES = [
    (ranks, val_batch_size, batching, sharded)
    for ranks, val_batch_size in [(1, 1), (1, 5), (2, 3), (4, 1), (4, 4)]
    for batching in ("packing", "padding")
    for sharded in ([True, False] if ranks == 2 else [ranks == 4])
]
MORE_CASES = [pytest.param(4, 2, batching, True, marks=pytest.mark.full) for batching in ("packing", "padding")]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> tuple[float, int]:
    return plain_eval(tiny_model, DOCUMENTS)


@pytest.fixture(scope="module")
def after_one_step() -> dict[str, float]:
    """The loss after one step by batching strategy, from the first case that trained it."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "val_batch_size", "batching", "sharded"), [*select(CASES, fast=lambda case: case[0] < 4), *MORE_CASES]
)
def test_eval_loss_is_that_of_the_whole_set_for_any_number_of_ranks(
    ranks: int,
    val_batch_size: int,
    batching: str,
    sharded: bool,
    reference: tuple[float, int],
    after_one_step: dict[str, float],
    tiny_model: Path,
    process_group: ProcessGroup,
    tmp_path: Path,
) -> None:
    flags = ["--val_batch_size", str(val_batch_size), "--batching_strategy", batching]
    before, after = evals(
        process_group, tiny_model, tmp_path / "run", ranks, *flags, *(["--enable_fsdp"] if sharded else [])
    )
    loss, count = reference
    assert (before["step"], before["epoch"]) == (0, 0)
    assert (after["step"], after["epoch"]) == (1, 1)
    assert before["num_label_tokens"] == after["num_label_tokens"] == count
    assert before["loss"] == pytest.approx(loss, rel=2e-6)
    assert after["loss"] == pytest.approx(after_one_step.setdefault(batching, after["loss"]), rel=2e-5)
    assert after["loss"] != pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(("ranks", "steps"), select_product([1, 2, 4], [1, 3], fast=lambda case: case[0] < 4))
def test_max_eval_step_counts_batches_over_the_whole_set(
    ranks: int, steps: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = ["--val_batch_size", "3", "--max_eval_step", str(steps), "--batching_strategy", "padding"]
    before = evals(process_group, tiny_model, tmp_path / "run", ranks, *flags)[0]
    loss, count = plain_eval(tiny_model, DOCUMENTS[: 3 * steps])
    assert before["num_label_tokens"] == count
    assert before["loss"] == pytest.approx(loss, rel=2e-6)


def test_max_eval_step_beyond_the_set_is_the_whole_set(
    reference: tuple[float, int], tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    flags = ["--max_eval_step", "1000", "--batching_strategy", "padding"]
    before = evals(process_group, tiny_model, tmp_path / "run", 1, *flags)[0]
    assert (before["loss"], before["num_label_tokens"]) == (pytest.approx(reference[0], rel=2e-6), reference[1])


def test_evaluating_does_not_change_what_is_trained(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Not the order of rows, not dropout's random numbers, not the mode of the model."""
    losses = []
    for name, flags in (("often", ["--eval_every_steps", "1", "--eval_before_training"]), ("never", [])):
        argv = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / name), "--save_model", "False"]
        argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--num_workers_dataloader", "0"]
        argv += ["--context_length", "64", "--max_train_step", "5", "--use_peft", "--lora_config.lora_dropout", "0.3"]
        argv += flags or ["--run_validation", "False"]
        process_group.train([*argv, "--lr", "1e-2"], 2)
        losses.append([event["loss"] for event in read_metrics(tmp_path / name) if event["event"] == "train"])
    assert losses[0] == losses[1]


def test_evaluations_and_warm_up_may_be_shares_of_an_epoch_and_of_the_run(
    process_group: ProcessGroup, tiny_model: Path, tmp_path: Path
) -> None:
    argv = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--save_model", "False"]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--context_length", str(CONTEXT_LENGTH)]
    argv += ["--batching_strategy", "padding", "--global_batch_size", "4", "--batch_size_training", "4"]
    argv += [
        "--scheduler",
        "constant",
        "--num_epochs",
        "2",
        "--evals_per_epoch",
        "3",
        "--warmup_ratio",
        "0.3",
        "--save_every_steps",
        "0",
    ]
    process_group.train(argv, 1)
    events = read_metrics(tmp_path / "run")
    (steps,) = [event["steps_per_epoch"] for event in events if event["event"] == "start"]
    every = -(-steps // 3)
    wanted = {step for step in range(1, 2 * steps + 1) if step % every == 0 or step % steps == 0}
    assert [event["step"] for event in events if event["event"] == "eval"] == sorted(wanted)
    assert len(wanted) >= 5
    rates = [event["lr"] for event in events if event["event"] == "train"]
    warmup = -(-2 * steps * 3 // 10)
    assert rates == pytest.approx([1e-4 * min(1, step / warmup) for step in range(2 * steps)])
