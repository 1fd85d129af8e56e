"""The optimizer of a run, built by its own file (policies/optimizers/NAME.py), and parts that all optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.host_optimizer import HostOptimizer
from policies.optimizers.host_weights import HostWeightsOptimizer
from policies.optimizers.kind import Groups, kind_of
from policies.optimizers.offload import CPUOffloadOptimizer
from policies.sharding import unwrap
from utils.errors import ConfigError
from utils.local_tensors import local_tensor
from utils.parameters import mark_vocabulary

SAMPLE = 1 << 16  # weights of each tensor that `_rounded_updates_note` looks at


def build_optimizer(
    model: nn.Module,
    train: TrainConfig,
    fsdp: FsdpConfig,
    *,
    lr_ratio: float = 1.0,
    layers: Sequence[nn.Module] = (),
    scales_loss: bool = False,
) -> Optimizer:
    """The optimizer of all trainable parameters. If its states are in host memory, it steps on the CPU.

    Args:
        lr_ratio: the learning rate of LoRA's matrices B, as a multiple of --lr.
        layers: that wait for their own weights, if they are updated while the next forward pass begins; without any,
            a step waits for all.
        scales_loss: backward brings gradients with a loss scale in them (fp16).

    Raises:
        ConfigError: if nothing is trainable, or if the optimizer needs bitsandbytes and it is missing.
    """
    kind = kind_of(fsdp.optimizer)
    mark_vocabulary(model)  # again: sharding has replaced the parameters
    groups = parameter_groups(
        model,
        decay_norms_and_biases=train.decay_norms_and_biases,
        lr_of_b=train.lr * lr_ratio if lr_ratio != 1 else None,
        options_of=kind.options_of,
    )
    build: Callable[[Groups], Optimizer] = partial(kind.build, train=train, fsdp=fsdp)
    is_early = steps_early(train, scales_loss=scales_loss)
    on_host: HostOptimizer
    if fsdp.optimizer_cpu_offload:
        # DistributedDataParallel reduces gradients after backward has made them.
        on_host = CPUOffloadOptimizer(
            groups, build, begins_early=is_early and not isinstance(model, DistributedDataParallel)
        )
    elif fsdp.fsdp_cpu_offload and kind.steps_alone:
        on_host = HostWeightsOptimizer(groups, build)
        if is_early:
            on_host.begin_early(model)
    else:
        return build(groups)
    if layers:
        on_host.return_late(unwrap(model), layers)
    return on_host


def steps_early(train: TrainConfig, *, scales_loss: bool) -> bool:
    """Whether gradients are final once backward has made them: they are not clipped, and no loss scale is in them."""
    return not (train.gradient_clipping or scales_loss)


def state_bytes(parameter: torch.Tensor, train: TrainConfig, fsdp: FsdpConfig, *, local: bool = False) -> int:
    """Bytes of the optimizer states of a parameter after its first step, without single numbers.

    Args:
        local: count this rank's part only.
    """
    shape = (local_tensor(parameter) if local else parameter).shape
    return kind_of(fsdp.optimizer).state_bytes(parameter, shape, train, fsdp)


def parameter_groups(
    model: nn.Module,
    *,
    decay_norms_and_biases: bool,
    lr_of_b: float | None = None,
    options_of: Callable[[nn.Parameter], dict[str, Any]] = lambda parameter: {},
) -> Groups:
    """The trainable parameters, those with the same options in one group; the first has the run's learning rate.

    Args:
        decay_norms_and_biases: if not, parameters of one dimension have no weight decay.
        lr_of_b: the learning rate of LoRA's matrices B; None: that of the others.
        options_of: what the optimizer sets apart (`policies.optimizers.kind.OptimizerKind`).

    Raises:
        ConfigError: if nothing is trainable.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            options = options_of(parameter)
            options |= {"weight_decay": 0.0} if parameter.dim() < 2 and not decay_norms_and_biases else {}
            options |= {"lr": lr_of_b} if lr_of_b is not None and ".lora_B." in name else {}
            groups.setdefault(tuple(sorted(options.items())), []).append(parameter)
    if not groups:
        raise ConfigError("--use_peft: nothing is trainable in this model; check the adapter or the frozen layers")
    order = sorted(groups, key=lambda options: ("lr" in dict(options), "weight_decay" in dict(options)))
    return [{"params": groups[options], **dict(options)} for options in order]


def optimizer_notes(model: nn.Module, lr: float, fsdp: FsdpConfig) -> list[str]:
    """Lines to print: many updates that bf16 rounds away, and what the optimizer's own file notes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind, notes = kind_of(fsdp.optimizer), list[str]()
    if kind.loses_small_updates and not fsdp.use_kahan_summation:
        notes += _rounded_updates_note(trained, lr)
    return [*notes, *kind.notes(trained)]


def _rounded_updates_note(trained: list[nn.Parameter], lr: float) -> list[str]:
    """A line if many of this rank's bf16 weights are too large for AdamW's updates, each of about the learning rate.

    A bf16 number has 8 significant bits, so adding less than 1/512 of it leaves it unchanged.
    """
    total = lost = 0.0
    for weights in (local_tensor(p).detach().flatten() for p in trained if p.dtype == torch.bfloat16):
        if weights.numel():  # this rank may hold no part of it
            # Evenly spaced, so a large tensor costs no pass over it.
            sample = weights[:: 1 + weights.numel() // SAMPLE]
            total += weights.numel()
            lost += weights.numel() * (sample.abs() > 512 * lr).double().mean().item()
    if lost <= 0.1 * total:
        return []
    return [
        f"optimizer: at --lr {lr:g}, {100 * lost / total:.0f} % of the trained bf16 weights are more than 500 times as "
        "large as an update, so rounding loses the update; --optimizer anyprecision --use_kahan_summation keeps it"
    ]
