"""Runs on several datasets: each gives what it was asked for, and a bad row is named with its dataset."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import finetuning
from data.batches.mixing import global_row
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
    words += ["--context_length", "128", "--truncation", "left"]
    (tmp_path / "samples/validation.jsonl").unlink()
    assert finetuning.main([*words, "--batching_strategy", "padding", "--batch_size_training", "8"]) == 0
    printed = capsys.readouterr().out
    said = re.search(r"pass 1 ended at step \d: \d+ samples \(samsum_dataset (\d+), custom_", printed)
    assert said
    assert int(said[1]) >= 20
    assert re.search(r"pass 1 ended .*; of the samples read: truncated \d+, tokens cut \d", printed)
    assert re.search(r"^[\d:]+ samsum_dataset, validation: none, since ", printed, re.MULTILINE)


def test_a_row_that_is_wrong_is_named_with_its_dataset(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_dataset.py").write_text(DATASET_FUNCTION.replace("[5 + index]", "[5 + 9000 * index]"))
    assert finetuning.main(flags) == 2
    assert re.search(r"error: dataset \(custom_dataset, train\), row 2: token id 9005", capsys.readouterr().err)


def test_a_loss_that_is_not_finite_names_datasets_and_rows() -> None:
    with single_process():
        rows = [global_row(1, 7), global_row(0, 3)]
        message = describe_non_finite(4, NonFiniteError(rows, []), ["samsum_dataset", "custom_dataset"], {})
    assert "rows of the training data in it: samsum_dataset 4, custom_dataset 8." in message


@pytest.fixture
def two_files(flags: list[str], tmp_path: Path) -> list[str]:
    """20 rows of dialogues in one file, and 4 in two others, which a glob names."""
    lines = (tmp_path / "samples/train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few").mkdir()
    for number in range(2):
        (tmp_path / f"few/{number}.jsonl").write_text("".join(lines[2 * number : 2 * number + 2]))
    words = [*flags[:2], *flags[flags.index("--output_dir") :], "--batching_strategy", "padding"]
    return [*words, "--samsum_dataset.data_path", f"{tmp_path}/samples/train.jsonl,{tmp_path}/few/*.jsonl"]


def test_files_of_one_dataset_have_the_shares_asked_for(
    two_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        finetuning.main([*two_files, "--dataset_weights", "1,3", "--samsum_dataset.validation_fraction", "0.25"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        "mix: samsum_dataset train.jsonl 0.25: 15 samples, 1.0 passes; samsum_dataset *.jsonl 0.75: 45 samples" in out
    )
    start, *_ = read_metrics(tmp_path / "run")
    assert (start["num_train_samples"], start["num_eval_samples"]) == (60, 6), "a quarter of each part is held out"


def test_files_of_one_dataset_stream_by_their_weights(
    two_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*two_files[: two_files.index("--num_epochs")], *two_files[two_files.index("--num_epochs") + 2 :]]
    words += ["--streaming", "--max_train_step", "6", "--batch_size_training", "8", "--dataset_weights", "1,1"]
    assert finetuning.main(words) == 0
    said = re.search(
        r"samples \(samsum_dataset train.jsonl (\d+), samsum_dataset \*.jsonl (\d+)", capsys.readouterr().out
    )
    assert said
    assert int(said[1]) >= 20
    assert int(said[2]) > 8, "the small part starts again"


def test_a_row_of_a_weighed_file_is_named_with_its_file(
    two_files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = '{"dialogue": "A: Hi", "summary": 5, "id": []}\n{"dialogue": "A: Hi"}\n'
    (tmp_path / "few/1.jsonl").write_text(broken)
    assert finetuning.main([*two_files, "--dataset_weights", "1,3"]) == 2
    assert re.search(
        r"error: --samsum_dataset.data_path: .*few/\*.jsonl, row 4 \(row 2 of .*few/1.jsonl\): column summary",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"--dataset_weights": "1,2,3"}, r"3 weights for 2 files \(.*; give one for each"),
        (
            {"--samsum_dataset.data_path": "samples/train.jsonl"},
            r"there is one dataset; name several .*a.jsonl,b.jsonl",
        ),
        ({"--samsum_dataset.data_path": "few/0.jsonl,few/0.jsonl"}, "names a file twice"),
    ],
)
def test_weights_that_are_not_of_the_files_are_refused(
    given: dict[str, str], reason: str, two_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = dict(zip(two_files[::2], two_files[1::2], strict=True)) | {"--dataset_weights": "1,2"} | given
    assert finetuning.main([word for pair in words.items() for word in pair]) == 2
    assert re.search(rf"error: .*{reason}", capsys.readouterr().err)
