"""The log line of a step: its fields, and the time left by the steps so far."""

from __future__ import annotations

import math

import pytest

import reporting.log_line
from reporting.log_line import TimeLeft, log_line

EVENT = {
    "step": 20,
    "epoch": 2,
    "loss": 1.23456,
    "grad_norm": 0.5,
    "lr": 1e-4,
    "tokens_per_second": 12345.6,
    "model_tflops_per_device": 3.14159,
    "data_wait_seconds": 0.0021,
}


def test_a_line_has_all_that_it_had_and_then_the_time_left() -> None:
    assert log_line(EVENT, num_steps=400, peak_gib=1.5, seconds_left=3723.4) == (
        "step 20/400 | epoch 2 | loss 1.2346 | grad_norm 0.5000 | lr 1.000e-04 | 12,346 tokens/s | "
        "3.14 TFLOP/s per device | peak 1.50 GiB | data wait 0.002 s | 1:02:03 left"
    )


def test_a_gradient_that_overflowed_is_shown() -> None:
    line = log_line(EVENT | {"grad_norm": math.inf}, num_steps=400, peak_gib=1.5, seconds_left=0)
    assert "| grad_norm inf |" in line


def test_the_time_left_counts_evaluations_and_not_the_step_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(reporting.log_line.time, "monotonic", lambda: now[0])
    left = TimeLeft(num_steps=110)
    assert left.seconds(101, step_seconds=60) == 9 * 60, "nothing else is known yet"
    now[0] += 2
    assert left.seconds(102, step_seconds=2) == 8 * 2
    now[0] += 2 + 6  # an evaluation before the step
    assert left.seconds(103, step_seconds=2) == 7 * 5
    now[0] += 100
    assert left.seconds(110, step_seconds=2) == 0
