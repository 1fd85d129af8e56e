"""fp16's loss scale: the loss is multiplied by it before backward, and gradients are divided by it before the update.

fp16 holds 6e-8 to 65504 (bf16 1e-38 to 3e38), and many gradients are smaller than that. Scaled, they are not rounded to
zero; scaled too far, they overflow to infinity, which shows, and the step's update is left out (Micikevicius et al.,
"Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0
GROWTH_FACTOR, GROWTH_INTERVAL = 2.0, 2000
BACKOFF_FACTOR = 0.5


class LossScaler:
    """A scale that falls by half where gradients overflow, and doubles after so many steps in which none did.

    The constants and their meaning are torch.amp.GradScaler's. That class looks for infinities once more in the
    gradients of each optimizer on each device, with an all-reduce of its own where they are DTensors, and waits for
    what it found, but for optimizers whose fused kernel takes it. Here `train_step` brings the global gradient norm to
    the host anyway, agreed over all ranks and shards, and an infinity anywhere shows in it: one answer for every
    optimizer, layout and offload, without a second wait.

    Unlike there the scale does not fall below 1: what overflows at 1 is too large for fp16 as it is, or not a number
    for another reason. Such a run ends with an error, instead of going on for ever without an update.

    Args:
        active: whether it scales; else the scale is 1 and stays so, and nothing is ever left out.
        growth_interval: steps.
    """

    def __init__(self, *, active: bool, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.active = active
        self.scale = FIRST_SCALE if active else 1.0
        self.growth_tracker = 0  # steps since the scale changed
        self.growth_interval = growth_interval

    @property
    def can_fall(self) -> bool:
        """Whether gradients that overflowed may be finite at a smaller scale."""
        return self.active and self.scale > LEAST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Choose the next step's scale by what happened in this one, the same on every rank."""
        if not self.active:
            return
        if overflowed:
            self.scale, self.growth_tracker = max(LEAST_SCALE, self.scale * BACKOFF_FACTOR), 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            grown = self.scale * GROWTH_FACTOR
            self.scale = grown if grown <= torch.finfo(torch.float32).max else self.scale

    def state_dict(self) -> dict[str, float] | None:
        """What a checkpoint keeps; None where it does not scale."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker} if self.active else None

    def load_state_dict(self, state: Mapping[str, float] | None) -> None:
        """Go on from there, where this one scales and that one did: None is of a run that did not, or is older."""
        if self.active and state is not None:
            self.scale, self.growth_tracker = float(state["scale"]), int(state["growth_tracker"])
