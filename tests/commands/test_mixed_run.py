"""Runs on several datasets: each gives what it was asked for, and a bad row is named with its dataset."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import finetuning
from data.mixing import global_row
from supervision.non_finite import NonFiniteError, describe_non_finite
from tests.helpers.loaded import single_process
from tests.helpers.processes import ROOT, read_metrics

DATASET_FUNCTION = """
def get_rows(dataset_config, tokenizer, split):
    rows = [{"input_ids": [5 + index] * 9, "labels": [5 + index] * 9} for index in range(8 if split == "train" else 3)]
    return iter(rows) if dataset_config.streaming else rows
"""


@pytest.fixture
def flags(tiny_model: Path, tmp_path: Path) -> list[str]:
    """20 rows of dialogues and 8 of a custom dataset's training split; 4 and 3 to evaluate on."""
    samples = tmp_path / "samples"
    samples.mkdir()
    for split, num_rows in (("train", 20), ("validation", 4)):
        lines = (ROOT / f"datasets/samples/dialogue_summary/{split}.jsonl").read_text().splitlines()
        (samples / f"{split}.jsonl").write_text("\n".join(lines[:num_rows]) + "\n")
    (tmp_path / "my_dataset.py").write_text(DATASET_FUNCTION)
    words = ["--model_name", str(tiny_model), "--dataset", f"samsum_dataset,{tmp_path}/my_dataset.py:get_rows"]
    words += ["--samsum_dataset.data_path", str(samples), "--output_dir", str(tmp_path / "run")]
    return [*words, "--num_workers_dataloader", "0", "--save_model", "False", "--num_epochs", "1"]


def test_an_epoch_of_a_mix_has_the_shares_asked_for(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = ["--dataset_weights", "3,9", "--batching_strategy", "padding"]
    assert finetuning.main([*flags, *weights]) == 0
    mixed = "mix: samsum_dataset 0.25: 20 samples, 1.0 passes; custom_dataset 0.75: 60 samples, 7.5 passes"
    assert mixed in capsys.readouterr().out
    start, *_ = read_metrics(tmp_path / "run")
    assert (start["num_train_samples"], start["num_train_rows"], start["num_eval_samples"]) == (80, 80, 7)
    facts = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["data"]["train"]
    assert facts["mix"] == [
        {"dataset": "samsum_dataset", "share": 0.25, "num_samples": 20, "num_passes": 1.0},
        {"dataset": "custom_dataset", "share": 0.75, "num_samples": 60, "num_passes": 7.5},
    ]
    trained = [event["num_tokens"] for event in read_metrics(tmp_path / "run") if event["event"] == "train"]
    assert sum(trained) == facts["num_tokens"]


@pytest.mark.parametrize("strategy", ["packing", "padding"])
def test_without_weights_every_sample_of_every_dataset_comes_once(
    strategy: str, flags: list[str], tmp_path: Path
) -> None:
    assert finetuning.main([*flags, "--batching_strategy", strategy]) == 0
    events = read_metrics(tmp_path / "run")
    facts = yaml.safe_load((tmp_path / "run/run.yaml").read_text())["data"]["train"]
    assert facts["num_samples"] == 28
    assert sum(event["num_label_tokens"] for event in events if event["event"] == "train") == facts["num_label_tokens"]


def test_a_mix_streams(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*flags[: flags.index("--num_epochs")], "--streaming", "--max_train_step", "6", "--dataset_weights", "1,1"]
    assert finetuning.main([*words, "--batching_strategy", "padding", "--batch_size_training", "8"]) == 0
    said = re.search(r"pass 1 ended at step \d: \d+ samples \(samsum_dataset (\d+), custom_", capsys.readouterr().out)
    assert said
    assert int(said[1]) >= 20


def test_a_row_that_is_wrong_is_named_with_its_dataset(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_dataset.py").write_text(DATASET_FUNCTION.replace("[5 + index]", "[5 + 9000 * index]"))
    assert finetuning.main(flags) == 2
    assert re.search(r"error: dataset \(custom_dataset, train\), row 2: token id 9005", capsys.readouterr().err)


def test_a_loss_that_is_not_finite_names_datasets_and_rows() -> None:
    with single_process():
        rows = [global_row(1, 7), global_row(0, 3)]
        message = describe_non_finite(4, NonFiniteError(rows), [], ["samsum_dataset", "custom_dataset"], {})
    assert "rows of the training data in it: samsum_dataset 4, custom_dataset 8." in message
