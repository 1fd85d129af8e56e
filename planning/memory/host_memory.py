"""Host memory and disk that a run needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from planning.memory.held_bytes import Scheme
from planning.memory.sharded_bytes import largest_read
from planning.memory.step_memory import Bytes
from planning.model.planned_model import PlannedModel
from policies.optimizers.build import state_bytes
from utils.units import GIB

PROCESS_BYTES = int(1.5 * GIB)
"""Resident memory of a rank before it has a model: Python, torch with its CUDA libraries, transformers."""

CPU_PROCESS_BYTES = int(0.5 * GIB)
"""The same of a rank on a CPU, where nothing of CUDA is loaded: 0.43 to 0.53 GiB were measured (docs/planning.md)."""

HEAP_SHARE = 0.3
"""Share of activations and temporaries by which a CPU's heap exceeds them. glibc keeps freed blocks below 32 MiB, and
rows of changing lengths leave gaps between them: 0 to 0.6 were measured (docs/planning.md)."""

WORKER_BYTES = int(0.7 * GIB)
"""Private memory of a data loading process that was forked: pages of the rank that it writes to, and its batches."""


def heap_bytes(phases: Mapping[str, Bytes]) -> int:
    """The bytes by which a CPU's heap makes the fullest moment fuller."""
    in_heap = {phase: 0 if phase == "load" else peak.activations + peak.temporaries for phase, peak in phases.items()}
    fullest = max(peak.total + int(HEAP_SHARE * in_heap[phase]) for phase, peak in phases.items())
    return fullest - max(peak.total for peak in phases.values())


def host_load_bytes(planned: PlannedModel) -> int:
    """Host memory of one rank while weights are read: one tensor at a time, whole, before its part goes to the device.

    With --fsdp_cpu_offload this rank's part of all stays.
    """
    return PROCESS_BYTES + 2 * largest_read(planned.adapted.model) + _offloaded(planned, pinned=True)


def worker_bytes(planned: PlannedModel) -> int:
    """Host memory of one rank's data loading processes."""
    return planned.config.train_config.num_workers_dataloader * WORKER_BYTES


def copy_bytes(planned: PlannedModel, scheme: Scheme) -> int:
    """Host memory of one rank's copy of its part of a checkpoint, if --async_save was given.

    A run that was not told copies only what host memory has room for (checkpointing/save_plan.py).
    """
    return checkpoint_bytes(planned) // scheme.num_shards if planned.config.train_config.async_save else 0


def host_training_bytes(planned: PlannedModel, scheme: Scheme) -> int:
    """Host memory of one rank while it trains: with offloading also parameters, gradients and states."""
    workers, copy = worker_bytes(planned), copy_bytes(planned, scheme)
    return PROCESS_BYTES + workers + copy + offloaded_bytes(planned, scheme, pinned=True)


def offloaded_bytes(planned: PlannedModel, scheme: Scheme, *, pinned: bool = False) -> int:
    """Bytes of one rank's parameters, gradients and states that are in host memory while it trains.

    Args:
        pinned: `fully_shard` pins parameters and gradients, for a GPU.
    """
    trained = [parameter for parameter in planned.adapted.model.parameters() if parameter.requires_grad]
    grads = _on_host(trained, scheme.num_shards, pinned=pinned) if scheme.grads_on_host else 0
    return _offloaded(planned, pinned=pinned) + grads + scheme.optimizer.on_host


def checkpoint_bytes(planned: PlannedModel) -> int:
    """Disk for one checkpoint of all ranks: states, and all weights, or those of the adapter if one is trained."""
    train, fsdp, model = planned.config.train_config, planned.config.fsdp_config, planned.adapted.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = trained if train.use_peft else list(model.parameters())
    return sum(p.nbytes for p in kept) + sum(state_bytes(parameter, train, fsdp) for parameter in trained)


def _offloaded(planned: PlannedModel, *, pinned: bool) -> int:
    """This rank's part of the parameters, if they live in host memory."""
    layout = planned.resolved.policies.layout
    if not layout.cpu_offload:
        return 0
    return _on_host(planned.adapted.model.parameters(), layout.mesh_shape[1], pinned=pinned)


def _on_host(parameters: Iterable[nn.Parameter], num_shards: int, *, pinned: bool) -> int:
    """Host memory of a rank's part of these. torch pins in powers of two (ATen's CachingHostAllocator.h)."""
    if not pinned:
        return sum(parameter.nbytes for parameter in parameters) // num_shards
    parts = (-(-parameter.nbytes // num_shards) for parameter in parameters)
    return sum(1 << (part - 1).bit_length() for part in parts if part)
