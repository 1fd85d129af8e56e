"""--best_metric: which evaluation's weights are the best, also after a stop or a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from checkpointing.train_state import TrainState
from tests.helpers.processes import ProcessGroup, RunningCommand, read_metrics, wait_until
from tests.helpers.refusals import dialogues, write_lines

FLAGS = ["--eval_generate", "--max_new_tokens", "8", "--eval_every_steps", "4", "--num_workers_dataloader", "0"]
FLAGS += ["--context_length", "64", "--batch_size_training", "2", "--lr", "1e-2", "--num_epochs", "9"]


def evals(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run) if event["event"] == "eval"]


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_the_highest_rouge_is_the_best_and_stays_it_after_a_resume(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """The validation set says something else than the training set: its loss rises, and so does its ROUGE."""
    run = tmp_path / "run"
    write_lines(tmp_path / "data/train.jsonl", dialogues(24))
    answers = [row | {"summary": f"Bob says {number} days."} for number, row in enumerate(dialogues(4))]
    write_lines(tmp_path / "data/validation.jsonl", answers)
    argv = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(tmp_path / "data")]
    argv += ["--output_dir", str(run), *FLAGS, "--best_metric", "rougeL", "--keep_best"]
    process_group.train([*argv, "--max_train_step", "40"], 1)
    first = evals(run)
    before = max(first, key=lambda event: event["rougeL"])  # the first of several
    assert before["rougeL"] > 0
    assert before["step"] != min(first, key=lambda event: event["loss"])["step"]
    assert yaml.safe_load((run / "run.yaml").read_text())["saved"]["step"] == before["step"]
    process_group.train([*argv, "--max_train_step", "44", "--resume", "auto"], 1)
    best = max(evals(run), key=lambda event: event["rougeL"])
    assert [event["step"] for event in evals(run)] == sorted({event["step"] for event in evals(run)})
    assert yaml.safe_load((run / "run.yaml").read_text())["saved"]["step"] == best["step"]
    assert (run / "checkpoints/best").read_text() == f"step-{best['step']:08d}\n"
    places = [(sample["step"], sample["row"]) for sample in samples(run)]
    assert places == sorted(set(places))
    assert {step for step, _ in places} == {event["step"] for event in evals(run)}


def test_a_stop_while_generating_leaves_the_evaluation_due(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_lines(tmp_path / "data/train.jsonl", dialogues(8))
    write_lines(tmp_path / "data/validation.jsonl", dialogues(2000))
    argv = ["--model_name", str(tiny_model), "--samsum_dataset.data_path", str(tmp_path / "data")]
    argv += ["--output_dir", str(run), *FLAGS, "--max_train_step", "4", "--max_eval_step", "400"]
    started = RunningCommand(*argv, world_size=2, torchrun=False, log=tmp_path / "log")
    try:
        wait_until(lambda: "generating ..." in (tmp_path / "log").read_text(), started)
        (run / "STOP").touch()
        assert started.wait(300) == [0, 0], (tmp_path / "log").read_text()
    finally:
        started.kill()
    assert read_metrics(run)[-1]["status"] == "stopped"
    assert evals(run) == []
    (state,) = (json.loads(file.read_text())["state"] for file in run.glob("checkpoints/*/state.json"))
    assert state["eval_due"] is True


def test_lower_loss_and_higher_rouge_are_better() -> None:
    state = TrainState(best_eval_loss=1.0, best_step=3)
    assert state.is_best(0.9, None)
    assert not state.is_best(1.0, None)
    assert state.is_best(2.0, 0.0), "the first one whose ROUGE counts"
    state.best_rouge = 30.0
    assert state.is_best(2.0, 30.1)
    assert not state.is_best(0.1, 30.0)
    assert not state.is_best(float("nan"), 99.0)
    assert not TrainState().is_best(0.1, -math.inf), "a figure that an evaluation lacks"
    assert TrainState.from_dict(state.to_dict()) == state
    earlier = {name: value for name, value in state.to_dict().items() if name != "best_rouge"}
    assert TrainState.from_dict(earlier).best_rouge is None
