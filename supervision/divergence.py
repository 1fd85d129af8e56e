"""Divergence: the mean loss of a run's last steps is well above that of its first ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from configs.train_settings.evaluation import DIVERGENCE_FACTOR, DIVERGENCE_STEPS


def note_loss(loss: float, first: list[float], last: list[float]) -> None:
    """Add a step's loss to those of the run's first DIVERGENCE_STEPS steps, or else to those of the last; both change.

    A loss that is not finite, as under fp16 now and then, is left out.
    """
    if not math.isfinite(loss):
        return
    if len(first) < DIVERGENCE_STEPS:
        first.append(loss)
    else:
        last.append(loss)
        del last[:-DIVERGENCE_STEPS]


def has_diverged(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the last losses have more than DIVERGENCE_FACTOR times the mean of the first, once there are enough."""
    return len(last) >= DIVERGENCE_STEPS and fmean(last) > DIVERGENCE_FACTOR * fmean(first)


def describe_divergence(first: Sequence[float], last: Sequence[float], *, lr: float) -> str:
    """A clause with both means, and what helps."""
    return (
        f"the loss diverges: its mean over the last {len(last)} steps is {fmean(last):.4g}, over the first "
        f"{len(first)} it was {fmean(first):.4g}; lower --lr ({lr:g}), or add --warmup_steps or --gradient_clipping"
    )
