"""Where an optimizer's states are, and their bytes; each optimizer's own figures are in policies/optimizers/NAME.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.build import state_bytes
from policies.optimizers.host_optimizer import BUCKET_BYTES
from policies.optimizers.kind import kind_of


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one rank's optimizer on its device and in host memory."""

    states: int
    temporaries: int  # in its step
    on_host: int = 0  # states, and copies of weights and gradients, if it steps on the CPU


def optimizer_bytes(
    parts: Sequence[torch.Tensor], trained: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig
) -> OptimizerBytes:
    """The bytes of the run's optimizer on this rank.

    Args:
        parts: this rank's parts of the trained parameters, with their rows cut; on the meta device.
        trained: the whole parameters.
    """
    states = sum(state_bytes(part, train, fsdp) for part in parts)
    stored = sum(part.nbytes for part in parts)
    if fsdp.fsdp_cpu_offload:
        # Weights before their update, of one bucket, if steps begin in backward (policies/optimizers/host_weights.py).
        is_early = kind_of(fsdp.optimizer).steps_alone and not train.gradient_clipping
        kept = min(stored, BUCKET_BYTES + max(part.nbytes for part in parts)) if is_early and parts else 0
        return OptimizerBytes(0, 0, on_host=states + kept)
    if fsdp.optimizer_cpu_offload:
        return OptimizerBytes(0, 0, on_host=states + 2 * stored)
    kind = kind_of(fsdp.optimizer)
    if kind.paged:
        return OptimizerBytes(0, 0, on_host=states)
    return OptimizerBytes(states, kind.temporary_bytes(trained if kind.steps_whole else parts, train, fsdp))
