"""Runs that train on a stream."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import finetuning
from tests.helpers.checkpoints import forget_marks
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics, train_events

DATASET_FUNCTION = """
import datasets

def get_rows(dataset_config, tokenizer, split):
    file = f"{dataset_config.data_path}/{split}.jsonl"
    rows = datasets.load_dataset("json", data_files=file, split="train", streaming=dataset_config.streaming)

    def tokenize(batch):
        prompts = tokenizer(batch["dialogue"], add_special_tokens=False)["input_ids"]
        answers = tokenizer(batch["summary"], add_special_tokens=False)["input_ids"]
        pairs = [(prompt, answer + [tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers)]
        return {"input_ids": [p + a for p, a in pairs], "labels": [[-100] * len(p) + a for p, a in pairs]}

    return rows.map(tokenize, batched=True, remove_columns=["id", "dialogue", "summary"])
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples' first 60 rows as JSON lines, and the dataset function that reads them."""
    folder = tmp_path_factory.mktemp("streamed")
    for split, num_rows in (("train", 60), ("validation", 6)):
        lines = (ROOT / f"datasets/samples/dialogue_summary/{split}.jsonl").read_text().splitlines()
        (folder / f"{split}.jsonl").write_text("\n".join(lines[:num_rows]) + "\n")
    (folder / "my_dataset.py").write_text(DATASET_FUNCTION)
    return folder


def flags(model: Path, data: Path, folder: Path, *given: str, num_workers: int = 0) -> list[str]:
    words = ["--model_name", str(model), "--dataset", f"{data}/my_dataset.py:get_rows", "--output_dir", str(folder)]
    words += ["--custom_dataset.data_path", str(data), "--streaming", "--context_length", "512", "--lr", "1e-3"]
    return [*words, "--num_workers_dataloader", str(num_workers), *given]


@pytest.mark.parametrize("strategy", ["packing", "padding"])
def test_a_streamed_run_says_what_it_knows(
    strategy: str, tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--batching_strategy", strategy, "--max_train_step", "16", "--batch_size_training", "4"]
    assert finetuning.main(flags(tiny_model, data, tmp_path / "run", *given)) == 0
    said = capsys.readouterr().out
    head = re.search(
        r"train: streamed, drawn from 10,000 samples at a time \(at \d+ tokens .* the first (\d+) have", said
    )
    assert head
    assert re.search(r"data +custom_dataset: train streamed; validation \d samples", said)
    assert re.search(rf"stream: pass 1 ended at step \d+: {head[1]} samples; 1\d,\d{{3}} tokens, .* rows", said)
    assert "step 16/16 | loss " in said
    start, *_ = read_metrics(tmp_path / "run")
    assert (start["num_train_samples"], start["num_train_rows"]) == (None, None)
    assert start["num_steps"] == start["steps_per_epoch"] == 16
    losses = [event["loss"] for event in train_events(tmp_path / "run")]
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("epoch_there", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_finished_streamed_run_goes_on_if_it_is_given_more_steps(
    epoch_there: int, tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    given = [
        "--batching_strategy",
        "padding",
        "--batch_size_training",
        "4",
        "--save_model",
        "False",
        "--max_train_step",
    ]

    def run(name: str, *steps: str) -> None:
        assert finetuning.main(flags(tiny_model, data, tmp_path / name, *given, *steps)) == 0

    run("whole", "6")
    run("extended", "3")
    if epoch_there == 2:  # as earlier versions left it
        checkpoint = tmp_path / "extended/checkpoints/step-00000003"
        values = json.loads((checkpoint / "state.json").read_text())
        values["state"] |= {"epoch": 2, "step_of_epoch": 0}
        (checkpoint / "state.json").write_text(json.dumps(values))
        forget_marks(checkpoint)
    run("extended", "6", "--resume", "auto")
    whole, extended = (
        [(event["step"], event["epoch"], event["loss"]) for event in train_events(tmp_path / name)]
        for name in ("whole", "extended")
    )
    assert len(whole) == 6
    assert extended == whole
    epochs = [event for event in read_metrics(tmp_path / "extended") if event["event"] == "epoch"]
    assert len(epochs) == 1, "a stream is one epoch, however often it goes on"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["padding", pytest.param("packing", marks=pytest.mark.full)])
def test_two_ranks_learn_what_one_learns_from_the_same_stream(
    strategy: str, tiny_model: Path, data: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    """More steps than a pass has, so that the data is read again."""
    losses = {}
    for name, world_size, num_workers, batches in (
        ("one", 1, 0, ["--batch_size_training", "4"]),
        ("one in parts", 1, 0, ["--batch_size_training", "2", "--gradient_accumulation_steps", "2"]),
        ("two", 2, 1, ["--batch_size_training", "2", "--enable_fsdp"]),
    ):
        given = [*batches, "--batching_strategy", strategy, "--max_train_step", "18", "--shuffle_buffer_size", "20"]
        line = flags(tiny_model, data, tmp_path / name, *given, num_workers=num_workers)
        outcomes = process_group.train(line, world_size)
        losses[name] = [event["loss"] for event in train_events(tmp_path / name)]
        assert len(losses[name]) == 18
        assert "stream: pass 1 ended at step" in outcomes[0].stdout
        assert f"stream: in pass {3 if strategy == 'packing' else 2} at the end" in outcomes[0].stdout
        assert "stream: pass 1 ended" not in "".join(outcome.stdout for outcome in outcomes[1:])
    assert losses["one in parts"] == pytest.approx(losses["one"], abs=2e-5)
    assert losses["two"] == pytest.approx(losses["one"], abs=2e-5)
