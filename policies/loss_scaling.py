"""The loss scale of fp16: the loss is multiplied by it before backward, gradients are divided by it before the update.

fp16 ranges from 6e-8 to 65504 (bf16 from 1e-38 to 3e38), and many gradients are smaller than that. Scaling keeps them
from being rounded to zero. If the scale is too large gradients overflow to infinity; the step's update is then skipped
(Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0
GROWTH_FACTOR, GROWTH_INTERVAL = 2.0, 2000
BACKOFF_FACTOR = 0.5


class LossScaler:
    """A loss scale that halves if gradients overflow, and doubles after `growth_interval` steps without overflow.

    The constants and their meaning are torch.amp.GradScaler's. That class searches the gradients for infinities once
    more, with an all-reduce of its own for DTensors, and waits for the result unless the optimizer's fused kernel takes
    it. Here `train_step` brings the global gradient norm to the host anyway, and any infinity shows in it. So there is
    one answer for every optimizer, layout and offload, and no second wait.

    Unlike GradScaler's, the scale never falls below 1. Gradients that overflow at 1 are too large for fp16, or not a
    number for another reason. Such a run ends with an error instead of going on for ever without updates.

    Args:
        active: whether to scale; otherwise the scale stays 1 and no update is ever skipped.
        growth_interval: in steps.
    """

    def __init__(self, *, active: bool, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.active = active
        self.scale = FIRST_SCALE if active else 1.0
        self.growth_tracker = 0  # steps since the scale last changed
        self.growth_interval = growth_interval

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale could make overflowing gradients finite."""
        return self.active and self.scale > LEAST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Set the scale of the next step. `overflowed` must be the same on every rank."""
        if not self.active:
            return
        if overflowed:
            self.scale, self.growth_tracker = max(LEAST_SCALE, self.scale * BACKOFF_FACTOR), 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            grown = self.scale * GROWTH_FACTOR
            # As in torch's kernel: a scale that would be infinite in fp32 does not grow.
            self.scale = grown if grown <= torch.finfo(torch.float32).max else self.scale

    def state_dict(self) -> dict[str, float] | None:
        """The state that a checkpoint keeps; None if not active."""
        return {"scale": self.scale, "growth_tracker": self.growth_tracker} if self.active else None

    def load_state_dict(self, state: Mapping[str, float] | None) -> None:
        """Continue from a checkpoint's state, if both runs scale; None comes from a run that did not, or an old one."""
        if self.active and state is not None:
            self.scale, self.growth_tracker = float(state["scale"]), int(state["growth_tracker"])
