"""The optimizer that --optimizer names. To add one: its name in configs/fsdp.py, and its two cases here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from configs.fsdp import OPTIMIZERS_IN_8BIT, FsdpConfig
from configs.training import TrainConfig
from policies.mixed_precision import DTYPES
from policies.optimizers.adafactor import Adafactor
from policies.optimizers.adamw_8bit import BLOCK, AdamW8bit, PagedAdamW8bit, has_8bit_states
from policies.optimizers.anyprecision import AnyPrecisionAdamW
from policies.optimizers.compiled_adamw import CompiledAdamW
from policies.optimizers.offload import CPUOffloadOptimizer
from utils.errors import ConfigError
from utils.local_tensors import local_tensor
from utils.units import readable

SAMPLE = 1 << 16  # weights of each tensor that `_rounded_updates_note` looks at


def build_optimizer(model: nn.Module, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
    """The optimizer of all trainable parameters; with --optimizer_cpu_offload it steps on the CPU.

    Raises:
        ConfigError: if nothing is trainable, or if the optimizer needs bitsandbytes and it is missing.
    """
    common: dict[str, Any] = {"lr": train.lr, "weight_decay": train.weight_decay}
    adam = common | {"betas": (train.adam_beta1, train.adam_beta2)}

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        match fsdp.optimizer:
            case "AdamW":
                return CompiledAdamW(groups, **adam) if fsdp.compile_optimizer else AdamW(groups, **adam, fused=True)
            case "SGD":
                # foreach: torch 2.13 has no sharding rule for the fused kernel of SGD.
                return SGD(groups, **common, momentum=train.momentum or 0.0, foreach=True)
            case "anyprecision":
                return AnyPrecisionAdamW(
                    groups,
                    **adam,
                    momentum_dtype=DTYPES[fsdp.momentum_dtype],
                    variance_dtype=DTYPES[fsdp.variance_dtype],
                    use_kahan_summation=fsdp.use_kahan_summation,
                )
            case "AdamW8bit":
                return AdamW8bit(groups, **adam)
            case "PagedAdamW8bit":
                return PagedAdamW8bit(groups, **adam)
            case "Adafactor":
                return Adafactor(groups, **common)

    groups = parameter_groups(model, decay_norms_and_biases=train.decay_norms_and_biases)
    return CPUOffloadOptimizer(groups, make) if fsdp.optimizer_cpu_offload else make(groups)


def state_bytes(parameter: torch.Tensor, train: TrainConfig, fsdp: FsdpConfig, *, local: bool = False) -> int:
    """Bytes of the optimizer states of a parameter after its first step, without single numbers.

    Args:
        local: count this rank's part only.
    """
    shape = (local_tensor(parameter) if local else parameter).shape
    num_elements = shape.numel()
    match fsdp.optimizer:
        case "AdamW":
            return 2 * parameter.element_size() * num_elements
        case "SGD":
            return parameter.element_size() * num_elements if train.momentum else 0
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
            num_matrices = shape[:-2].numel()  # 1 for a parameter of two dimensions
            return 4 * (shape[:-1].numel() + num_matrices * shape[-1])


def parameter_groups(model: nn.Module, *, decay_norms_and_biases: bool) -> list[dict[str, Any]]:
    """The trainable parameters in one group, or in two: the second, norms and biases, has no weight decay.

    Raises:
        ConfigError: if nothing is trainable.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("--use_peft: nothing is trainable in this model; check the adapter or the frozen layers")
    if decay_norms_and_biases:
        return [{"params": parameters}]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def optimizer_notes(model: nn.Module, lr: float, fsdp: FsdpConfig) -> list[str]:
    """Lines to print if bf16 rounds many updates away, or if many states of an 8-bit optimizer have 32 bits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    notes = []
    if fsdp.optimizer in ("AdamW", "anyprecision", *OPTIMIZERS_IN_8BIT) and not fsdp.use_kahan_summation:
        notes += _rounded_updates_note(trained, lr)
    if fsdp.optimizer in OPTIMIZERS_IN_8BIT:
        notes += _wide_states_note(trained)
    return notes


def _rounded_updates_note(trained: list[nn.Parameter], lr: float) -> list[str]:
    """A line if many of this rank's bf16 weights are too large for AdamW's updates, each of about the learning rate.

    A bf16 number has 8 significant bits, so adding less than 1/512 of it leaves it unchanged.
    """
    total = lost = 0.0
    for weights in (local_tensor(p).detach().flatten() for p in trained if p.dtype == torch.bfloat16):
        if weights.numel():  # this rank may hold no part of it
            sample = weights[:: 1 + weights.numel() // SAMPLE]
            total += weights.numel()
            lost += weights.numel() * (sample.abs() > 512 * lr).double().mean().item()
    if lost <= 0.1 * total:
        return []
    return [
        f"optimizer: at --lr {lr:g}, {100 * lost / total:.0f} % of the trained bf16 weights are more than 500 times as "
        "large as an update, so rounding loses the update; --optimizer anyprecision --use_kahan_summation keeps it"
    ]


def _wide_states_note(trained: list[nn.Parameter]) -> list[str]:
    """A line if more than 5 % of the trained weights have states in 32 bits."""
    total = sum(parameter.numel() for parameter in trained)
    wide = [parameter for parameter in trained if not has_8bit_states(parameter)]
    num_wide = sum(parameter.numel() for parameter in wide)
    if num_wide <= 0.05 * total:
        return []
    return [
        f"optimizer: {num_wide:,} of {total:,} trained weights ({100 * num_wide / total:.0f} %), in {len(wide)} of "
        f"{len(trained)} tensors, have optimizer states in 32 bits ({readable(8 * num_wide)}): 8 bits need rows whose "
        f"length is a multiple of {BLOCK}"
    ]
