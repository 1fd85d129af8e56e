"""Trackers by themselves: one that breaks, and the packages that they need."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from configs.tracking import TrackingConfig
from reporting.end_summary import end_summary
from reporting.metrics_file import MetricsFile
from reporting.trackers import PACKAGES, Trackers, open_trackers
from tests.helpers.processes import ROOT
from tests.helpers.tracking_files import tensorboard_scalars
from utils.errors import ConfigError
from utils.optional_packages import check_installed, requirement


class Recorded:
    """A tracker that keeps what it gets, and may break at some step."""

    def __init__(self, breaks_at: int = 0) -> None:
        self.breaks_at = breaks_at
        self.values: dict[int, dict[str, float]] = {}
        self.finished: bool | None = None

    def write(self, step: int, values: dict[str, float]) -> None:
        if step == self.breaks_at:
            raise OSError("the disk is gone\nand more")
        self.values.setdefault(step, {}).update(values)

    def close(self, *, finished: bool) -> None:
        self.finished = finished


def test_a_tracker_that_breaks_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    trackers, sound, broken = Trackers(said.append), Recorded(), Recorded(breaks_at=2)
    trackers.open("broken", lambda: broken)
    trackers.open("sound", lambda: sound)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", trackers)
    metrics.write("start", num_steps=3)
    for step in (1, 2, 3):
        metrics.write("train", step=step, loss=1.5 * step, grad_norm=math.nan)
    metrics.write("epoch", epoch=1, train_loss=3.0, eval_loss=None)
    metrics.write("end", step=3, status="failed", seconds=1.0)
    assert said == ["broken: OSError: the disk is gone; the run goes on without it"]
    assert broken.values == {1: {"train/loss": 1.5}}
    assert sound.values[1] == {"train/loss": 1.5}
    assert sound.values[3] == {"train/loss": 4.5, "epoch/epoch": 1, "epoch/train_loss": 3.0, "end/seconds": 1.0}
    assert (sound.finished, broken.finished) == (False, None)
    assert len(metrics.read()) == 6


def test_the_end_of_a_run_without_a_finite_loss_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("settings: {}\n")
    evals = [{"event": "eval", "step": step, "loss": None} for step in (0, 4)]
    assert end_summary(evals, tmp_path, device_type="cpu") == [
        "eval loss not finite (step 0) -> not finite (step 4), best not finite (step 4)",
        "weights not saved",
    ]


def test_the_end_of_a_stopped_run_tells_how_to_take_the_weights_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("settings: {}\n")
    end = {"event": "end", "step": 2, "status": "stopped", "seconds": 1.0}
    *_, last = end_summary([end], tmp_path, device_type="cpu")
    assert last == f"weights in the checkpoint alone; to take them out: python -m tools.export {tmp_path} --to DIR"


def test_refusals_name_the_versions_of_the_requirements_file() -> None:
    lines = (ROOT / "requirements-tracking.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [requirement(name) for name in PACKAGES.values()]
    assert requirement("torch").startswith("torch>=")  # not another package whose name begins so, nor a comment
    with pytest.raises(ConfigError, match=r"^--flag: needs the package no-such; pip install 'no-such'$"):
        check_installed("--flag", "no-such")


def test_the_plan_of_a_run_reaches_tensorboard(tmp_path: Path) -> None:
    plan = {"verdict": "fits", "peak_gib": 12.5, "seconds_per_step": 0.25, "price": None, "phases": {"forward": {}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    trackers = open_trackers(TrackingConfig(use_tensorboard=True), tmp_path, {}, {}, print)
    trackers.write("end", {"step": 3, "status": "finished", "peak_allocated_gib": 12.0})
    assert tensorboard_scalars(tmp_path / "tensorboard") == {
        "plan/peak_gib": {0: 12.5},
        "plan/seconds_per_step": {0: 0.25},
        "end/peak_allocated_gib": {3: 12.0},
    }
