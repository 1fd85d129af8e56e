"""The learning rate of each step."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from configs.training import TrainConfig


def build_scheduler(optimizer: Optimizer, train: TrainConfig, *, steps_per_epoch: int, num_steps: int) -> LRScheduler:
    """The schedule that --scheduler names; it is stepped once per optimizer step.

    All schedules rise linearly from 0 over `warmup_steps`. After that `step` multiplies by gamma once per epoch, and
    `cosine` and `linear` fall to 0 at `num_steps`.
    """
    if train.scheduler != "step":
        name = "constant_with_warmup" if train.scheduler == "constant" else train.scheduler
        return get_scheduler(name, optimizer, num_warmup_steps=train.warmup_steps, num_training_steps=num_steps)

    def factor(step: int) -> float:
        warmup = min(1.0, step / train.warmup_steps) if train.warmup_steps else 1.0
        return warmup * train.gamma ** (step // steps_per_epoch)

    return LambdaLR(optimizer, factor)
