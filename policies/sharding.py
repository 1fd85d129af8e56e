"""How parameters, gradients and optimizer states are spread over the ranks.

| strategy      | between forward and backward | over                                  |
|---------------|------------------------------|---------------------------------------|
| FULL_SHARD    | sharded again                | all ranks                             |
| SHARD_GRAD_OP | kept whole                   | all ranks                             |
| HYBRID_SHARD  | sharded again                | a group of ranks, copied to the others |
| NO_SHARD      | always whole                 | nothing: every rank holds a copy      |

NO_SHARD is DistributedDataParallel where weights are computed in the dtype they are stored in, and `fully_shard` over
groups of one rank where they are cast, or where they live in host memory. One process that casts is the same thing with
one rank: the policy that casts is the same in every layout, and so are its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from configs.run import RunConfig
from policies.mixed_precision import Precision
from utils.compat import no_buffer_sync
from utils.distributed import set_timeouts
from utils.environment import Environment
from utils.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """What `shard` does. `mesh_shape` is (copies of the model, ranks that share one copy)."""

    kind: str  # "plain", "ddp" or "fully_shard"
    strategy: str  # as on the command line; "SINGLE" for one process without FSDP
    mesh_shape: tuple[int, int]
    reshard_after_forward: bool
    cpu_offload: bool = False  # parameters, gradients and optimizer states in host memory

    def parameter_device(self, device: torch.device) -> torch.device:
        """Where parameters live between the computations of a rank that computes on `device`."""
        return torch.device("cpu") if self.cpu_offload else device


def choose_layout(config: RunConfig, precision: Precision, env: Environment) -> Layout:
    """The layout that the flags ask for on these ranks.

    Raises:
        ConfigError: where HYBRID_SHARD's groups do not fit the world size.
    """
    fsdp, world_size, offload = config.fsdp_config, env.world_size, config.fsdp_config.fsdp_cpu_offload
    if not config.train_config.enable_fsdp or fsdp.sharding_strategy == "NO_SHARD":
        strategy = "SINGLE" if world_size == 1 and not config.train_config.enable_fsdp else "NO_SHARD"
        kind = "fully_shard" if precision.casts or offload else ("ddp" if world_size > 1 else "plain")
        # A whole copy per rank in host memory has to go back there after use, or it would be on the device as well.
        return Layout(kind, strategy, (world_size, 1), reshard_after_forward=offload, cpu_offload=offload)
    if fsdp.sharding_strategy == "HYBRID_SHARD":
        mesh_shape = _hybrid_mesh_shape(config, env)
        return Layout("fully_shard", "HYBRID_SHARD", mesh_shape, reshard_after_forward=True, cpu_offload=offload)
    reshard = fsdp.sharding_strategy == "FULL_SHARD"
    return Layout("fully_shard", fsdp.sharding_strategy, (1, world_size), reshard, cpu_offload=offload)


def _hybrid_mesh_shape(config: RunConfig, env: Environment) -> tuple[int, int]:
    fsdp, world_size = config.fsdp_config, env.world_size
    if fsdp.replica_group_size and not fsdp.sharding_group_size:
        flag, sharding = "replica_group_size", max(1, world_size // fsdp.replica_group_size)
    else:
        flag, sharding = "sharding_group_size", fsdp.sharding_group_size or env.local_world_size
    replicas = fsdp.replica_group_size or max(1, world_size // sharding)
    if replicas * sharding != world_size:
        raise ConfigError(
            f"--fsdp_config.{flag}: {replicas} copies x {sharding} ranks is not the world "
            f"size {world_size}; give group sizes whose product it is, or leave them 0"
        )
    return replicas, sharding


def shard(
    model: nn.Module, units: Sequence[nn.Module], layout: Layout, precision: Precision, device: torch.device
) -> None:
    """Cut the model's parameters over the ranks, where the layout does. They may be on the meta device still."""
    if layout.kind != "fully_shard":
        return
    mesh = init_device_mesh(device.type, layout.mesh_shape, mesh_dim_names=("replicate", "shard"))
    set_timeouts()  # of the mesh's own groups
    if layout.mesh_shape[0] == 1:
        mesh = mesh["shard"]
    # Pinned memory is what lets copies run beside computing; without a GPU there is nothing to pin it for.
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if layout.cpu_offload else OffloadPolicy()
    policies: dict[str, Any] = {"mesh": mesh, "mp_policy": precision.policy, "offload_policy": offload}
    for unit in units:
        fully_shard(unit, reshard_after_forward=layout.reshard_after_forward, **policies)
    # The root's own parameters (norm, head) are needed again at once in backward: never reshard them in between.
    fully_shard(model, reshard_after_forward=False, **policies)


def replicate(model: nn.Module, layout: Layout) -> nn.Module:
    """Wrap a model that has its weights in DistributedDataParallel, where the layout is that."""
    if layout.kind != "ddp":
        return model
    # Gradients live in the buckets that are reduced, not beside them; ranks start equal, buffers stay so.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **no_buffer_sync())


def num_units(model: nn.Module) -> int:
    """Modules that are gathered one at a time, the root among them; 0 where nothing is gathered."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def unit_notes(model: nn.Module, config: RunConfig) -> list[str]:
    """A line where layers were to be gathered one at a time and the model has none that it names as such."""
    if num_units(model) != 1 or config.fsdp_config.wrap == "root":
        return []
    return ["wrap: this model names no repeated layers; it is gathered as one unit, all of its weights at a time"]


def accumulates_unsharded(config: RunConfig, layout: Layout, model: nn.Module, device: torch.device) -> bool:
    """Whether micro-batches accumulate whole gradients and reduce them once per step.

    That is the least communication, at the price of whole fp32 gradients on every rank; for a model that was
    sharded to fit, this could be what breaks it. Unset, it is chosen if they need less than a tenth of the
    device's memory (always on CPU).
    """
    if layout.kind != "fully_shard" or layout.mesh_shape[1] == 1:
        return True
    asked = config.fsdp_config.accumulate_unsharded
    if asked is not None:
        return asked
    if device.type == "cpu":
        return True
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return gradient_bytes < 0.1 * torch.cuda.get_device_properties(device).total_memory


@contextmanager
def gradient_sync(model: nn.Module, *, is_last: bool, accumulate_unsharded: bool) -> Iterator[None]:
    """Around one micro-batch's forward and backward: communicate gradients only where it is needed.

    On the last micro-batch gradients are reduced over all ranks. Before that, nothing is communicated, or, where
    gradients accumulate sharded, they are reduced inside the sharding group alone.
    """
    if isinstance(model, DistributedDataParallel):
        if is_last:
            yield
        else:
            with model.no_sync():
                yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or not accumulate_unsharded)
        model.set_requires_all_reduce(is_last)
    yield


def reshard(model: nn.Module) -> None:
    """After a forward without backward: shard again what backward would have, which may be the whole model.

    Until then its parameters would be the gathered ones, in memory and to whoever asks for them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_class(model: nn.Module) -> type[nn.Module]:
    """The model's class without what `fully_shard` made of it."""
    bases = (base for base in type(model).__mro__ if issubclass(base, nn.Module))
    return next(base for base in bases if not issubclass(base, FSDPModule))


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without DistributedDataParallel around it (`fully_shard` wraps nothing)."""
    return model.module if isinstance(model, DistributedDataParallel) else model
