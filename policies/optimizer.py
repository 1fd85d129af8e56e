"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from configs.errors import ConfigError
from configs.run import RunConfig
from policies.optimizer_offload import CPUOffloadOptimizer


def build_optimizer(model: nn.Module, config: RunConfig) -> Optimizer:
    """The optimizer over what is trainable, and nothing else, stepping all tensors together; on the CPU where asked.

    Raises:
        ConfigError: where nothing is trainable.
    """
    train = config.train_config
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("--use_peft: nothing is trainable in this model; check the adapter or the frozen layers")

    def make(tensors: Sequence[torch.Tensor]) -> Optimizer:
        if config.fsdp_config.optimizer == "SGD":
            momentum = train.momentum or 0.0
            # foreach: torch 2.13 has no sharding rule for the fused kernel of SGD.
            return SGD(tensors, lr=train.lr, momentum=momentum, weight_decay=train.weight_decay, foreach=True)
        return AdamW(tensors, lr=train.lr, weight_decay=train.weight_decay, fused=True)

    return CPUOffloadOptimizer(parameters, make) if config.fsdp_config.optimizer_cpu_offload else make(parameters)


def build_scheduler(optimizer: Optimizer, config: RunConfig, *, steps_per_epoch: int, num_steps: int) -> LRScheduler:
    """The learning rate of every optimizer step.

    All schedules rise linearly from 0 over `warmup_steps`. After that `step` multiplies by gamma once per epoch, and
    `cosine` and `linear` fall to 0 at `num_steps`.
    """
    train = config.train_config
    if train.scheduler != "step":
        name = "constant_with_warmup" if train.scheduler == "constant" else train.scheduler
        return get_scheduler(name, optimizer, num_warmup_steps=train.warmup_steps, num_training_steps=num_steps)

    def factor(step: int) -> float:
        warmup = min(1.0, step / train.warmup_steps) if train.warmup_steps else 1.0
        return warmup * train.gamma ** (step // steps_per_epoch)

    return LambdaLR(optimizer, factor)
