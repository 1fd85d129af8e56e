"""The log line of an optimizer step, with an estimate of the time left."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

MOST_COLUMNS = 111  # 120 with the time in front of it
NOTABLE_WAIT = 0.1  # share of a step


def log_line(event: dict[str, Any], *, num_steps: int, peak_gib: float, seconds_left: float) -> str:
    """One greppable line of at most `MOST_COLUMNS`.

    Args:
        event: the step's `train` event.
    """
    before = [
        f"step {event['step']}/{num_steps}",
        f"loss {event['loss']:.4f}",
        f"grad {event['grad_norm']:.3f}",
        f"lr {event['lr']:.2e}",
        f"{_shortened(event['tokens_per_second'])} tok/s",
    ]
    after = [f"{_three_digits(peak_gib)} GiB", f"{clock(seconds_left)} left"]
    tflops, waited = event["model_tflops_per_device"], event["data_wait_seconds"] / event["step_seconds"]
    between = []
    if waited >= NOTABLE_WAIT:
        between = [f"wait {100 * waited:.0f} %"]  # for data; how fast the device computes says little then
    elif math.isfinite(tflops):  # not known for images
        between = [f"{_three_digits(tflops)} TFLOP/s"]
    line = " | ".join([*before, *between, *after])
    return line if len(line) <= MOST_COLUMNS else " | ".join([*before, *after])


def _three_digits(value: float) -> str:
    """ "0.48", "61.5", "312": of a number below one two digits, of a large one all before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _shortened(value: float) -> str:
    """ "512", "12.3k", "1.23M"."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{_three_digits(value / unit)}{name}"
    return f"{value:.0f}"


class TimeLeft:
    """Estimates how long the remaining steps take, by the steps of this session so far.

    Evaluations and saves between them count. The session's first step, which compiles, counts only as long as it is the
    only one.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._first: tuple[int, float] | None = None  # the session's first step, and when it ended

    def seconds(self, step: int, step_seconds: float) -> float:
        """The estimate after this step. Call it after every step."""
        now = time.monotonic()
        first_step, ended_at = self._first = self._first or (step, now)
        per_step = step_seconds if step == first_step else (now - ended_at) / (step - first_step)
        return per_step * (self.num_steps - step)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03"; with days before them: "4d 5:02:03"."""
    if abs(seconds) >= 1e10:
        return f"{seconds:.3g} s"
    days, rest = divmod(round(seconds), 86400)
    return (f"{days}d " if days else "") + str(timedelta(seconds=rest))


def shown_perplexity(value: float, digits: int) -> str:
    """A perplexity for people: in scientific form from a million on, which means nothing but that the loss is high."""
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.2e}"


def perplexity(loss: float) -> float:
    """exp(loss); infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
