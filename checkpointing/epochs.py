"""How many steps a run's epochs have, as a checkpoint says: its step, epoch and step of the epoch must fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def epochs_of(before: Mapping[str, Any] | None, steps_per_epoch: int) -> dict[str, int]:
    """The entry of state.json: since `first`, which began after `after_step`, an epoch has had so many steps.

    Args:
        before: the values of the checkpoint's state.json that the run goes on from. With --resume_anyway its epochs may
            have had another number of steps, and those of earlier versions do not say how many.
    """
    if before is None:
        return {"first": 1, "after_step": 0, "steps": steps_per_epoch}
    known: dict[str, int] | None = before.get("epochs")
    if known is not None and known["steps"] == steps_per_epoch:
        return known
    state = before["state"]
    return {"first": state["epoch"], "after_step": state["step"] - state["step_of_epoch"], "steps": steps_per_epoch}
