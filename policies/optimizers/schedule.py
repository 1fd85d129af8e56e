"""The learning rate of each step."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from configs.training import TrainConfig


def build_scheduler(optimizer: Optimizer, train: TrainConfig, *, steps_per_epoch: int, num_steps: int) -> LambdaLR:
    """Sets the optimizer's learning rate to --lr times `lr_factor`; `step()` is called once per optimizer step."""
    return LambdaLR(optimizer, partial(lr_factor, train=train, steps_per_epoch=steps_per_epoch, num_steps=num_steps))


def lr_factor(step: int, train: TrainConfig, *, steps_per_epoch: int, num_steps: int) -> float:
    """The fraction of --lr that the step uses, where the run's first step is 0.

    Every schedule rises linearly from 0 in the warm-up. Then `step` multiplies by gamma once per epoch, but not below
    `min_lr`; `cosine` and `linear` fall to `min_lr` at `num_steps`; `constant` stays at 1.
    """
    lowest = train.min_lr / train.lr
    warmup_steps = train.warmup_of(num_steps)
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    if train.scheduler == "step":
        return warmup * max(lowest, train.gamma ** (step // steps_per_epoch))
    if warmup < 1.0 or train.scheduler == "constant":
        return warmup
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if train.scheduler == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:  # not 1 - progress, which rounds twice: these are transformers' rates to the bit
        remaining = (num_steps - step) / max(1, num_steps - warmup_steps)
    return lowest + (1 - lowest) * max(0.0, remaining)
