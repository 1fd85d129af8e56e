"""What optimizers hold: their states, and what they need beside them while they step.

Temporaries are those of our own optimizers (policies/optimizers) and of torch's kernels: `fused` updates in place;
`foreach` AdamW makes one list of tensors as large as all states of one kind, the square roots of the averaged squares
(torch/optim/adamw.py, `_multi_tensor_adamw`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.anyprecision import SLICE_SIZES
from policies.optimizers.build import state_bytes


@dataclass(frozen=True)
class OptimizerBytes:
    """What the optimizer of a rank holds on the device, and in host memory."""

    states: int
    temporaries: int  # in its step
    on_host: int = 0  # states, and copies of weights and gradients, if it steps on the CPU


def optimizer_bytes(parts: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig) -> OptimizerBytes:
    """Of our optimizers.

    Args:
        parts: this rank's parts of the trained parameters, with their rows cut; on the meta device.
    """
    states = sum(state_bytes(part, train, fsdp) for part in parts)
    stored = sum(part.nbytes for part in parts)
    if fsdp.fsdp_cpu_offload:
        return OptimizerBytes(0, 0, on_host=states)
    if fsdp.optimizer_cpu_offload:
        return OptimizerBytes(0, 0, on_host=states + 2 * stored)
    if fsdp.optimizer == "PagedAdamW8bit":  # its states leave the device if it is full
        return OptimizerBytes(0, 0, on_host=states)
    return OptimizerBytes(states, _temporaries(parts, stored, train, fsdp))


def _temporaries(parts: Sequence[torch.Tensor], stored: int, train: TrainConfig, fsdp: FsdpConfig) -> int:
    numels = [part.numel() for part in parts]
    match fsdp.optimizer:
        case "SGD":  # foreach: with weight decay a new list of gradients
            return stored if train.weight_decay else 0
        case "anyprecision":
            # Of a slice: weight, gradient and averages in fp32 where they are not so stored, denominator and change.
            copies = 2 + sum(dtype != "fp32" for dtype in (fsdp.momentum_dtype, fsdp.variance_dtype))
            copies += 2 * any(part.dtype != torch.float32 for part in parts) + fsdp.use_kahan_summation
            return 4 * copies * min(sum(numels), SLICE_SIZES["cuda"])
        case "Adafactor":  # one parameter at a time: the update and the moved weight in fp32
            return 2 * 4 * max(numels, default=0)
    return 0
