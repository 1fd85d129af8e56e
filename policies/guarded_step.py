"""Optimizer steps that are left out if numbers are not finite: by the device itself, so that the host need not look."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from policies.loss_scaling import LossScaler
from policies.optimizers.host_optimizer import undo_step
from utils.local_tensors import local_tensor


def guarded_step(
    optimizer: Optimizer, scaler: LossScaler, numbers: torch.Tensor, read: Callable[[], tuple[float, float]]
) -> None:
    """Update the weights, unless the loss or the gradient is not finite, and set the loss scale of the next step.

    The host waits for the device if the loss is scaled (fp16), or if the optimizer cannot leave out an update.

    Args:
        numbers: the loss and the gradient's norm, on the device.
        read: waits for them, and raises NonFiniteError where no smaller scale could help.
    """
    is_queued = step_if_finite(optimizer, numbers, may_recover=scaler.active)
    if scaler.active or not is_queued:
        try:
            overflowed = not math.isfinite(read()[1])
        except BaseException:  # the run ends with the weights before this step
            undo_step(optimizer)
            raise
        if not (is_queued or overflowed):
            optimizer.step()
        scaler.update(overflowed=overflowed)


def step_if_finite(optimizer: Optimizer, numbers: torch.Tensor, *, may_recover: bool) -> bool:
    """Queue an update that the device leaves out if a number is not finite; weights and states then stay as they are.

    The host does not wait, so it queues the update while the device still computes gradients. torch's fused optimizers
    can do this.

    Args:
        numbers: on the device of the weights, the same on every rank.
        may_recover: whether later steps go on after an update that was left out, as under fp16 with a smaller loss
            scale. If not, all later updates are left out, too: the host reads a step's numbers after it has queued the
            next update, and then finds the weights as they were before the step that failed.

    Returns:
        False, and no update, if this optimizer cannot leave one out or has its weights on another device.
    """
    weight = local_tensor(optimizer.param_groups[0]["params"][0])
    # torch's names, as torch.amp.GradScaler.step uses them
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or weight.device != numbers.device:
        return False
    found_inf = (~numbers.isfinite()).any().float()
    # Sticky: once a step was not finite, all updates that the host has queued meanwhile are left out as well.
    if not may_recover and (before := getattr(optimizer, "found_inf", None)) is not None:
        found_inf = torch.maximum(found_inf, before)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.step()
    return True
