"""Optimizer steps that the device itself leaves out if numbers are not finite, so that the host need not look first."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from utils.local_tensors import local_tensor


def queue_step(optimizer: Optimizer, numbers: torch.Tensor) -> bool:
    """Step unless a number is not finite, which the device finds out: weights and states stay as they are then.

    The host does not wait, so it queues the step while the device still computes gradients. torch's fused optimizers
    can do this.

    Args:
        numbers: on the device of the weights, the same on every rank.

    Returns:
        False, and no step, if this optimizer cannot, or has its weights on another device.
    """
    weight = local_tensor(optimizer.param_groups[0]["params"][0])
    # torch's names for it, as torch.amp.GradScaler.step uses them
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or weight.device != numbers.device:
        return False
    optimizer.found_inf = (~numbers.isfinite()).any().float()  # type: ignore[attr-defined]
    optimizer.step()
    return True
