"""Losses that grow: said, and on request the run's end. Evaluations that get no better: its end, on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.train_settings.evaluation import DIVERGENCE_STEPS
from supervision.divergence import has_diverged, note_loss
from tests.helpers.processes import ProcessGroup, read_metrics, train_events
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import PLAIN, flags_of

HIGH_LR = [
    "--lr",
    "2",
    "--warmup_steps",
    "50",
    "--max_train_step",
    "60",
    "--global_batch_size",
    "2",
    "--save_model",
    "False",
]


@pytest.mark.parametrize(("later", "diverged"), [(1.48, False), (1.52, True)])
def test_the_mean_of_the_last_steps_decides(later: float, diverged: bool) -> None:
    first: list[float] = []
    last: list[float] = []
    for loss in [2.0] * DIVERGENCE_STEPS + [0.1] * 5 + [2.0 * later] * (DIVERGENCE_STEPS - 1):
        note_loss(loss, first, last)
        assert not has_diverged(first, last)
    note_loss(float("inf"), first, last)
    note_loss(2.0 * later, first, last)
    assert has_diverged(first, last) == diverged


def test_a_loss_that_grows_is_told_once_in_mid_run_and_once_at_the_end(
    tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    (outcome,) = process_group.train(flags_of(tiny_model, tmp_path / "run", *HIGH_LR), 1)
    assert outcome.stdout.count("warning: the loss diverges: its mean over the last 20 steps is ") == 2
    assert read_metrics(tmp_path / "run")[-1]["status"] == "finished"
    perplexities = [part.split()[1] for part in outcome.stdout.split("| ") if part.startswith("perplexity ")]
    assert perplexities
    assert all(len(shown.strip()) < 12 for shown in perplexities)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_as_failed_with_a_checkpoint_to_go_on_from(
    ranks: int, tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = [*HIGH_LR, *PLAIN, "--stop_on_divergence", "--save_every_steps", "0"]
    outcomes = process_group.run(flags_of(tiny_model, tmp_path / "run", *argv), ranks)
    assert [outcome.status for outcome in outcomes] == [1] * ranks
    (line,) = error_lines(outcomes[0].stderr)
    events = read_metrics(tmp_path / "run")
    step = events[-1]["step"]
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "failed")
    assert 2 * DIVERGENCE_STEPS <= step < 60
    assert f"--stop_on_divergence: step {step} of 60: the loss diverges" in line
    assert (tmp_path / f"run/checkpoints/step-{step:08d}/COMPLETE").is_file()
    assert train_events(tmp_path / "run")[-1]["step"] == step
    # Its last losses are its own: it has DIVERGENCE_STEPS steps to get better.
    for flag, value in (("--lr", "1e-5"), ("--max_train_step", str(step + 2))):
        argv[argv.index(flag) + 1] = value
    argv += ["--resume", "auto", "--resume_anyway"]
    process_group.train(flags_of(tiny_model, tmp_path / "run", *argv), ranks)


def test_after_evaluations_without_a_gain_the_run_ends_and_does_not_go_on(
    tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = ["--lr", "0.3", "--max_train_step", "40", "--eval_every_steps", "2", "--early_stopping_patience", "3"]
    flags = flags_of(tiny_model, tmp_path / "run", *argv, "--save_every_steps", "0")
    (outcome,) = process_group.train(flags, 1)
    evals = [event for event in read_metrics(tmp_path / "run") if event["event"] == "eval"]
    losses = [event["loss"] for event in evals]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 3
    step = evals[-1]["step"]
    assert step < 40
    assert f"early_stopping_patience: ended after step {step} of 40: 3 evaluations in a row" in outcome.stdout
    end = read_metrics(tmp_path / "run")[-1]
    assert (end["status"], end["step"]) == ("finished", step)
    state = json.loads((tmp_path / f"run/checkpoints/step-{step:08d}/state.json").read_text())["state"]
    assert (state["evals_since_best"], state["best_step"]) == (3, evals[best]["step"])
    process_group.train([*flags, "--resume", "auto"], 1)
    assert train_events(tmp_path / "run")[-1]["step"] == step
    flags[flags.index("--early_stopping_patience") + 1] = "5"
    process_group.train([*flags, "--resume", "auto"], 1)
    assert train_events(tmp_path / "run")[-1]["step"] > step
