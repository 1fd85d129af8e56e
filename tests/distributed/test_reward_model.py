"""Reward models: the margin loss of a plain loop over pairs in every layout, and better answers score higher."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, pipeline

from tests.helpers import random_answers
from tests.helpers.labeled_texts import words, write_rows
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.random_answers import texts_of
from tests.helpers.text_models import save_text_model

NUM_STEPS, LR, MOMENTUM = 3, 0.1, 0.9
SHARDED, REPLICATED = ("--enable_fsdp",), ("--enable_fsdp", "--sharding_strategy", "NO_SHARD")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    for family in ("llama", "roberta"):
        save_text_model(folder / family, family, tiny_model, num_labels=1)
    return folder


def margins(model: Any, split: str) -> torch.Tensor:
    pairs = [[ids for ids, _ in texts_of(row)] for row in random_answers.get_custom_dataset(None, None, split)]
    scores = [[model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in pair] for pair in pairs]
    return torch.stack([chosen - rejected for chosen, rejected in scores])


@pytest.mark.parametrize(
    ("family", "ranks", "flags"),
    [
        ("llama", 1, ("--batch_size_training", "1")),
        ("llama", 2, (*SHARDED, "--batch_size_training", "2")),
        ("llama", 2, (*REPLICATED, "--batch_size_training", "8", "--batching_strategy", "padding")),
        ("roberta", 2, (*SHARDED, "--batch_size_training", "12")),
    ],
)
def test_steps_are_those_of_a_plain_loop(
    family: str, ranks: int, flags: tuple[str, ...], models: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = ["--task", "reward_model", "--model_name", str(models / family), "--output_dir", str(tmp_path / "run")]
    argv += ["--dataset", f"{random_answers.__file__}:get_custom_dataset", "--context_length", "96"]
    argv += ["--global_batch_size", "48", "--num_epochs", str(NUM_STEPS), "--gamma", "1.0", "--lr", str(LR)]
    argv += ["--optimizer", "SGD", "--momentum", str(MOMENTUM)]  # AdamW makes steps of gradients' rounding
    argv += ["--num_workers_dataloader", "0", "--mixed_precision", "False", *flags]
    process_group.train(argv, ranks)
    model = AutoModelForSequenceClassification.from_pretrained(models / family, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    events = train_events(tmp_path / "run")
    assert len(events) == NUM_STEPS
    for event in events:
        loss = -F.logsigmoid(margins(model.train(), "train")).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        assert event["num_pairs"] == random_answers.NUM_PAIRS["train"]
        assert event["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert event["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    with torch.no_grad():
        wanted = margins(model.eval(), "validation")
    found = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"][-1]
    assert found["num_pairs"] == len(wanted)
    assert found["loss"] == pytest.approx(-F.logsigmoid(wanted).mean().item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((wanted > 0).double().mean().item())
    assert found["margin"] == pytest.approx(wanted.double().mean().item(), rel=1e-5, abs=1e-5)


def pairs(num_rows: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {"prompt": words(rng), "chosen": f" {words(rng, 'happy')}", "rejected": f" {words(rng, 'angry')}"}
        for _ in range(num_rows)
    ]


def test_better_answers_score_higher(tiny_model: Path, process_group: ProcessGroup, tmp_path: Path) -> None:
    write_rows(tmp_path / "data", pairs, 256, 64)
    argv = ["--task", "reward_model", "--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run")]
    argv += ["--dataset", "preference_dataset", "--preference_dataset.data_path", str(tmp_path / "data")]
    argv += ["--preference_dataset.as_chat", "False", "--context_length", "192", "--batch_size_training", "1"]
    argv += ["--lr", "3e-3", "--num_epochs", "3", "--best_metric", "accuracy", "--num_workers_dataloader", "0"]
    process_group.train(argv, 1)
    evaluations = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"]
    assert evaluations[-1]["accuracy"] > 0.9
    assert evaluations[-1]["margin"] > 0
    score = pipeline("text-classification", model=str(tmp_path / "run/model"))
    good, bad = score(["they walked home happy", "they walked home angry"])
    assert good["score"] > bad["score"]
    assert json.loads((tmp_path / "run/model/config.json").read_text())["problem_type"] == "regression"
