"""Divergence: the mean loss of a run's last steps is well above that of its first ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

NUM_STEPS = 20
FACTOR = 1.5


def note_loss(loss: float, first: list[float], last: list[float]) -> None:
    """Add a step's loss to those of the run's first NUM_STEPS steps, or else to those of the last; both change.

    A loss that is not finite, as under fp16 now and then, is left out.
    """
    if not math.isfinite(loss):
        return
    if len(first) < NUM_STEPS:
        first.append(loss)
    else:
        last.append(loss)
        del last[:-NUM_STEPS]


def has_diverged(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the mean of the last losses is more than FACTOR times that of the first, once there are enough."""
    return len(last) >= NUM_STEPS and fmean(last) > FACTOR * fmean(first)


def describe_divergence(first: Sequence[float], last: Sequence[float], *, lr: float) -> str:
    """A clause with both means, and what helps."""
    return (
        f"the loss diverges: its mean over the last {len(last)} steps is {fmean(last):.4g}, over the first "
        f"{len(first)} it was {fmean(first):.4g}; lower --lr ({lr:g}), or add --warmup_steps or --gradient_clipping"
    )
