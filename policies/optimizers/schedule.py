"""The learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from configs.training import TrainConfig


def build_scheduler(optimizer: Optimizer, train: TrainConfig, *, steps_per_epoch: int, num_steps: int) -> LRScheduler:
    """The schedule that --scheduler names; it is stepped once per optimizer step.

    All schedules rise linearly from 0 over `warmup_steps`. After that `step` multiplies by gamma once per epoch, not
    below `min_lr`, and `cosine` and `linear` fall to `min_lr` at `num_steps`.
    """
    least = train.min_lr / train.lr
    if train.scheduler != "step":
        name = "constant_with_warmup" if train.scheduler == "constant" else train.scheduler
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=train.warmup_steps, num_training_steps=num_steps)
        if least:
            scheduler = cast(LambdaLR, scheduler)
            falling = partial(_fall_to, least, warmup_steps=train.warmup_steps)
            scheduler.lr_lambdas = [partial(falling, factor) for factor in scheduler.lr_lambdas]
        return scheduler

    def factor(step: int) -> float:
        warmup = min(1.0, step / train.warmup_steps) if train.warmup_steps else 1.0
        return warmup * max(least, train.gamma ** (step // steps_per_epoch))

    return LambdaLR(optimizer, factor)


def _fall_to(least: float, factor: Callable[[int], float], step: int, *, warmup_steps: int) -> float:
    """A factor that falls from 1 to 0 after warm-up, made to fall to `least` instead."""
    return factor(step) if step < warmup_steps else least + (1 - least) * factor(step)
