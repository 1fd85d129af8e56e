"""The log line of an optimizer step, with an estimate of the time left."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any


def log_line(event: dict[str, Any], *, num_steps: int, peak_gib: float, seconds_left: float) -> str:
    """One greppable line.

    Args:
        event: the step's `train` event.
    """
    tflops = event["model_tflops_per_device"]
    speed = f"{tflops:.2f} TFLOP/s per device | " if math.isfinite(tflops) else ""  # not known for images
    return (
        f"step {event['step']}/{num_steps} | epoch {event['epoch']} | loss {event['loss']:.4f} | "
        f"grad_norm {event['grad_norm']:.4f} | lr {event['lr']:.3e} | {event['tokens_per_second']:,.0f} tokens/s | "
        f"{speed}peak {peak_gib:.2f} GiB | "
        f"data wait {event['data_wait_seconds']:.3f} s | {clock(seconds_left)} left"
    )


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
    """Hours, minutes and seconds: "1:02:03"."""
    return str(timedelta(seconds=round(seconds))) if abs(seconds) < 1e10 else f"{seconds:.3g} s"


def shown_perplexity(value: float, digits: int) -> str:
    """A perplexity for people: in scientific form from a million on, which means nothing but that the loss is high."""
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.2e}"


def perplexity(loss: float) -> float:
    """exp(loss); infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
