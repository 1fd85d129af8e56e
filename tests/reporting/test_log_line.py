"""The log line of a step: its fields, and the time left by the steps so far."""

from __future__ import annotations

import math

import pytest

import reporting.log_line
from reporting.log_line import TimeLeft, log_line
from utils.log_clock import LogClock

EVENT = {
    "step": 20,
    "epoch": 2,
    "loss": 1.23456,
    "grad_norm": 0.5,
    "lr": 1e-4,
    "tokens_per_second": 12345.6,
    "model_tflops_per_device": 3.14159,
    "data_wait_seconds": 0.0021,
    "step_seconds": 1.0,
}


def line_of(**changed: float) -> str:
    sizes = {"num_steps": 400, "peak_gib": 1.5, "seconds_left": 3723.4}
    sizes |= {name: changed.pop(name) for name in list(changed) if name in sizes}
    return log_line(EVENT | changed, **sizes)  # type: ignore[arg-type]


def test_a_line_says_how_the_step_went_and_how_long_the_run_takes() -> None:
    assert line_of() == (
        "step 20/400 | loss 1.2346 | grad 0.500 | lr 1.00e-04 | 12.3k tok/s | 3.14 TFLOP/s | 1.50 GiB | 1:02:03 left"
    )


def test_a_step_that_waited_for_its_data_says_so() -> None:
    assert "| wait 34 % |" in line_of(data_wait_seconds=0.34)


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 99_999, "num_steps": 99_999},
        {"step": 1_234_567, "num_steps": 9_999_999, "grad_norm": 1234.5, "loss": 12.3456, "seconds_left": 3e6},
        {"data_wait_seconds": 1.0, "step": 9_999, "num_steps": 99_999, "seconds_left": 36e4},
    ],
)
def test_a_line_with_its_time_fits_into_120_columns(changed: dict[str, float]) -> None:
    large = {"tokens_per_second": 9.87e6, "model_tflops_per_device": 987.6, "peak_gib": 139.4}
    (_, line) = LogClock().stamped(line_of(**(large | changed)))
    assert len(line) <= 120, line
    assert "left" in line


def test_a_gradient_that_overflowed_is_shown() -> None:
    assert "| grad inf |" in line_of(grad_norm=math.inf)


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
