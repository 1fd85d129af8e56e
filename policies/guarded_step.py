"""Optimizer steps that the device itself leaves out if numbers are not finite, so that the host need not look first."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from utils.local_tensors import local_tensor


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
