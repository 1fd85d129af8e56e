"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from configs.fsdp import OPTIMIZERS_IN_8BIT
from configs.run import RunConfig
from policies.mixed_precision import DTYPES
from policies.optimizers.adafactor import Adafactor
from policies.optimizers.adamw_8bit import BLOCK, AdamW8bit, PagedAdamW8bit, has_8bit_states
from policies.optimizers.anyprecision import AnyPrecisionAdamW
from policies.optimizers.offload import CPUOffloadOptimizer
from utils.distributed import local_tensor
from utils.errors import ConfigError
from utils.units import readable


def build_optimizer(model: nn.Module, config: RunConfig) -> Optimizer:
    """The optimizer over what is trainable, and nothing else; on the CPU where asked.

    Raises:
        ConfigError: where nothing is trainable, or bitsandbytes is needed and not there.
    """
    train, fsdp = config.train_config, config.fsdp_config
    common: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        match fsdp.optimizer:
            case "AdamW":
                return AdamW(groups, **common, fused=True)
            case "SGD":
                # foreach: torch 2.13 has no sharding rule for the fused kernel of SGD.
                return SGD(groups, **common, momentum=train.momentum or 0.0, foreach=True)
            case "anyprecision":
                return AnyPrecisionAdamW(
                    groups,
                    **common,
                    momentum_dtype=DTYPES[fsdp.momentum_dtype],
                    variance_dtype=DTYPES[fsdp.variance_dtype],
                    use_kahan_summation=fsdp.use_kahan_summation,
                )
            case "AdamW8bit":
                return AdamW8bit(groups, **common)
            case "PagedAdamW8bit":
                return PagedAdamW8bit(groups, **common)
            case "Adafactor":
                return Adafactor(groups, **common)

    groups = parameter_groups(model, config)
    return CPUOffloadOptimizer(groups, make) if fsdp.optimizer_cpu_offload else make(groups)


def parameter_groups(model: nn.Module, config: RunConfig) -> list[dict[str, Any]]:
    """What is trained: in one group, or in two, of which the second, of norms and biases, does not decay.

    Raises:
        ConfigError: where nothing is trainable.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("--use_peft: nothing is trainable in this model; check the adapter or the frozen layers")
    if config.train_config.decay_norms_and_biases:
        return [{"params": parameters}]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def optimizer_notes(model: nn.Module, config: RunConfig) -> list[str]:
    """Lines for what an optimizer's name does not tell: updates that bf16 rounds away, states that have 32 bits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*_lost_updates(trained, config), *_wide_states(trained, config)]


_SAMPLE = 1 << 16  # weights of each tensor that are looked at, evenly spaced


def _lost_updates(trained: list[nn.Parameter], config: RunConfig) -> list[str]:
    """A line where many of this rank's bf16 weights are too large for AdamW's updates, of about the learning rate each.

    A bf16 number has 8 significant bits: what is below 1/512 of it never changes it.
    """
    fsdp, lr = config.fsdp_config, config.train_config.lr
    if fsdp.optimizer not in ("AdamW", "anyprecision", *OPTIMIZERS_IN_8BIT) or fsdp.use_kahan_summation:
        return []
    total = lost = 0.0
    for weights in (local_tensor(p).detach().flatten() for p in trained if p.dtype == torch.bfloat16):
        if weights.numel():  # else this rank has no part of it
            sample = weights[:: 1 + weights.numel() // _SAMPLE]
            total += weights.numel()
            lost += weights.numel() * (sample.abs() > 512 * lr).double().mean().item()
    if lost <= 0.1 * total:
        return []
    return [
        f"optimizer: at --lr {lr:g}, {100 * lost / total:.0f} % of the trained bf16 weights are more than 500 times as "
        "large as an update, which they round away; --optimizer anyprecision --use_kahan_summation keeps it"
    ]


def _wide_states(trained: list[nn.Parameter], config: RunConfig) -> list[str]:
    """A line where 8-bit states were asked for and much of what is trained has them in 32 bits."""
    if config.fsdp_config.optimizer not in OPTIMIZERS_IN_8BIT:
        return []
    total = sum(parameter.numel() for parameter in trained)
    exact = [parameter for parameter in trained if not has_8bit_states(parameter)]
    num_exact = sum(parameter.numel() for parameter in exact)
    if num_exact <= 0.05 * total:
        return []
    return [
        f"optimizer: {num_exact:,} of {total:,} trained weights ({100 * num_exact / total:.0f} %), in {len(exact)} of "
        f"{len(trained)} tensors, have optimizer states in 32 bits ({readable(8 * num_exact)}): 8 bits need rows that "
        f"are a multiple of {BLOCK} long"
    ]


def state_bytes(parameter: torch.Tensor, config: RunConfig, *, local: bool = False) -> int:
    """Of the states that the optimizer will have for a parameter after its first step, single numbers left out.

    Args:
        local: this rank's part of them alone.
    """
    fsdp = config.fsdp_config
    shape = (local_tensor(parameter) if local else parameter).shape
    num_elements = shape.numel()
    match fsdp.optimizer:
        case "AdamW":
            return 2 * parameter.element_size() * num_elements
        case "SGD":
            return parameter.element_size() * num_elements if config.train_config.momentum else 0
        case "anyprecision":
            sizes = DTYPES[fsdp.momentum_dtype].itemsize + DTYPES[fsdp.variance_dtype].itemsize
            return (sizes + (2 if fsdp.use_kahan_summation else 0)) * num_elements
        case "AdamW8bit" | "PagedAdamW8bit":
            if not has_8bit_states(parameter):
                return 8 * num_elements
            return 2 * num_elements + 8 * (num_elements // BLOCK)
        case "Adafactor":
            if parameter.dim() < 2:
                return 4 * num_elements
            num_matrices = shape[:-2].numel()  # of two dimensions, 1
            return 4 * (shape[:-1].numel() + num_matrices * shape[-1])


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
