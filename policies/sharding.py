"""How parameters, gradients and optimizer states are sharded over the ranks.

| strategy      | between forward and backward | over                                  |
|---------------|------------------------------|---------------------------------------|
| FULL_SHARD    | sharded again                | all ranks                             |
| SHARD_GRAD_OP | kept whole                   | all ranks                             |
| HYBRID_SHARD  | sharded again                | a group of ranks, copied to the others |
| NO_SHARD      | always whole                 | nothing: every rank holds a copy      |

NO_SHARD is DistributedDataParallel if weights are computed in the dtype that they are stored in. If they are cast, or
live in host memory, it is `fully_shard` over groups of one rank; a single process that casts is the same with one rank.
So one policy casts in every layout, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.direct_collectives import asks_directly
from policies.gradient_memory import keep_gradients_with_computing
from policies.mixed_precision import Precision
from policies.replicated_weights import num_asked
from ranks.environment import Environment
from ranks.process_group import set_timeouts
from utils.compat import no_buffer_sync, record_outputs_as_before
from utils.device import DeviceFacts
from utils.errors import ConfigError
from utils.torch_internals import forget_forwards


@dataclass(frozen=True)
class Layout:
    """How `shard` and `replicate` lay out a model. `mesh_shape` is (copies of the model, ranks that share one copy)."""

    kind: str  # "plain", "ddp" or "fully_shard"
    strategy: str  # as on the command line; "SINGLE" for one process without FSDP
    mesh_shape: tuple[int, int]
    reshard_after_forward: bool
    cpu_offload: bool = False  # parameters, gradients and optimizer states in host memory
    is_direct: bool = False  # units are gathered and reduced without packing, where they can be
    num_replicated: int | None = 0  # layers whose frozen weights stay whole; None: a plan chooses, else none do

    def parameter_device(self, device: torch.device) -> torch.device:
        """Where the parameters of a rank that computes on `device` live between uses."""
        return torch.device("cpu") if self.cpu_offload else device


def choose_layout(train: TrainConfig, fsdp: FsdpConfig, precision: Precision, env: Environment) -> Layout:
    """The layout that the flags ask for on these ranks.

    Raises:
        ConfigError: if HYBRID_SHARD's groups do not fit the world size, --wrap names units and there are none,
            gradients cannot be reduced in --reduce_dtype, or --direct_collectives has nothing to gather.
    """
    layout = _layout_of_flags(train, fsdp, precision, env)
    gathers = layout.kind == "fully_shard" and layout.mesh_shape[1] > 1 and not layout.cpu_offload
    layout = replace(
        layout,
        num_replicated=num_asked(fsdp, precision) if gathers else 0,
        is_direct=asks_directly(fsdp, gathers=gathers),
    )
    if fsdp.reduce_dtype == "bf16" and env.world_size == 1:
        raise ConfigError(
            "--reduce_dtype: bf16 is for sums over ranks, and this run has one process; start several, or leave this "
            "out"
        )
    if fsdp.reduce_dtype == "fp32" and layout.kind == "ddp" and precision.gradient_dtype(train) != torch.float32:
        raise ConfigError(
            "--reduce_dtype: DistributedDataParallel, which keeps the copies here, sums bf16 gradients in bf16; give "
            "--enable_fsdp with another --sharding_strategy than NO_SHARD, or leave this out"
        )
    return layout


def _layout_of_flags(train: TrainConfig, fsdp: FsdpConfig, precision: Precision, env: Environment) -> Layout:
    world_size, offload = env.world_size, fsdp.fsdp_cpu_offload
    if not train.enable_fsdp or fsdp.sharding_strategy == "NO_SHARD":
        strategy = "SINGLE" if world_size == 1 and not train.enable_fsdp else "NO_SHARD"
        kind = "fully_shard" if precision.casts or offload else ("ddp" if world_size > 1 else "plain")
        if kind != "fully_shard" and fsdp.wrap != ("layer",):
            raise ConfigError(
                f"--wrap: {','.join(fsdp.wrap)} has no effect under NO_SHARD with {precision.name}, which gathers "
                "and casts no weights; leave it out"
            )
        # With offload each rank's whole copy returns to host memory after use; else it would stay on the device too.
        return Layout(kind, strategy, (world_size, 1), reshard_after_forward=offload, cpu_offload=offload)
    if fsdp.sharding_strategy == "HYBRID_SHARD":
        mesh_shape = _hybrid_mesh_shape(fsdp, env)
        return Layout("fully_shard", "HYBRID_SHARD", mesh_shape, reshard_after_forward=True, cpu_offload=offload)
    reshard = fsdp.sharding_strategy == "FULL_SHARD"
    return Layout("fully_shard", fsdp.sharding_strategy, (1, world_size), reshard, cpu_offload=offload)


def _hybrid_mesh_shape(fsdp: FsdpConfig, env: Environment) -> tuple[int, int]:
    world_size = env.world_size
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
    model: nn.Module,
    units: Sequence[nn.Module],
    layout: Layout,
    precision: Precision,
    device: torch.device,
    *,
    replicated: Collection[nn.Parameter] = (),
    uncast: Collection[nn.Module] = (),
) -> None:
    """Shard the model's parameters over the ranks, if the layout does. They may still be on the meta device.

    Args:
        replicated: those that stay whole on every rank (`policies.replicated_weights`).
        uncast: units inside the vision encoder. What it hands its layers keeps its dtype, as the fp32 angles of
            patches do, whether they are units or the encoder is one. The root has cast the pixels.
    """
    if layout.kind != "fully_shard":
        return
    mesh = init_device_mesh(device.type, layout.mesh_shape, mesh_dim_names=("replicate", "shard"))
    set_timeouts()  # of the mesh's own groups
    if layout.mesh_shape[0] == 1:
        # There is one copy: a mesh of two dimensions would add an all-reduce over copies.
        mesh = mesh["shard"]
    # Copies overlap with computing only from pinned memory; without a GPU there is nothing to pin it for.
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if layout.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload, "ignored_params": set(replicated) or None}
    for unit in units:  # inner ones first: each takes the parameters that no earlier unit has
        policy = replace(precision.policy, cast_forward_inputs=unit not in uncast)
        fully_shard(unit, reshard_after_forward=layout.reshard_after_forward, mp_policy=policy, **options)
        record_outputs_as_before(unit)
    # The root's own parameters (norm, head) are needed again at once in backward: never reshard them in between.
    fully_shard(model, reshard_after_forward=False, mp_policy=precision.policy, **options)
    if layout.mesh_shape[0] == 1 and layout.mesh_shape[1] > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                keep_gradients_with_computing(module, device)
    if precision.reduce_dtype == torch.bfloat16:
        # NCCL averages by multiplying each rank's part by 1 / ranks, rounded to bf16: 0.2 % off for 3 or 6 ranks.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def replicate(model: nn.Module, layout: Layout, *, has_unused: bool = False) -> nn.Module:
    """The model with its weights, wrapped in DistributedDataParallel if that is the layout.

    Args:
        has_unused: some trainable parameters may take no part in the loss.
    """
    if layout.kind != "ddp":
        return model
    # Gradients are views of the buckets that are reduced: no second copy. Ranks start equal, and buffers stay so.
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=has_unused, **no_buffer_sync()
    )


def num_units(model: nn.Module) -> int:
    """The number of modules that are gathered one at a time, the root included; 0 if nothing is sharded."""
    return sum(isinstance(module, FSDPModule) for module in model.modules())


def unit_notes(model: nn.Module, wrap: Sequence[str]) -> list[str]:
    """A line to print if layers should be gathered one at a time and the model names none."""
    is_replicated = not all(isinstance(parameter, DTensor) for parameter in model.parameters())  # layers with names
    if num_units(model) != 1 or wrap == ("root",) or is_replicated:
        return []
    return ["wrap: this model names no repeated layers; it is gathered as one unit, all of its weights at a time"]


class Accumulation(NamedTuple):
    """How the gradients of a step's micro-batches are added. After the last one they are reduced over all ranks."""

    unsharded: bool  # whole ones, reduced once per step; else they are reduced inside the sharding group each time
    all_reduced: bool = False  # each time over the copies of the model, too
    keeps_weights: bool = False  # all that were gathered, or cast, stay until the step's last backward


def choose_accumulation(
    asked: bool | None, layout: Layout, precision: Precision, model: nn.Module, device: DeviceFacts
) -> Accumulation:
    """How micro-batches accumulate gradients.

    Unsharded accumulation communicates least, but every rank then holds whole fp32 gradients, for which a model that
    was sharded to fit may leave no room. `fully_shard` accumulates in the dtype in which it reduces. So with
    --reduce_dtype bf16 each micro-batch is reduced over all ranks before it is added.

    Args:
        asked: --accumulate_unsharded. Unset: True if the gradients need less than a tenth of the device's memory, and
            on CPU.
    """
    if layout.kind != "fully_shard":
        return Accumulation(unsharded=True)
    # Weights stay gathered until backward in any case. Keeping them to the last backward costs a few percent of the
    # peak, since the last gradients are reduced meanwhile; plans count that.
    keeps_weights = not layout.reshard_after_forward
    if precision.reduce_dtype == torch.bfloat16:
        return Accumulation(unsharded=False, all_reduced=True, keeps_weights=keeps_weights)
    unsharded = asked
    # Groups of one rank hold whole gradients anyway.
    if layout.mesh_shape[1] == 1 or (asked is None and device.type == "cpu"):
        unsharded = True
    elif asked is None:
        # In fp32, the dtype in which they are reduced and added.
        gradient_bytes = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
        unsharded = gradient_bytes < 0.1 * device.memory_bytes
    return Accumulation(unsharded=bool(unsharded), keeps_weights=keeps_weights)


def reduction_notes(
    asked: bool | None,
    layout: Layout,
    precision: Precision,
    model: nn.Module,
    device: DeviceFacts,
    num_micro_batches: int,
) -> list[str]:
    """A line if sums in bf16, which are made after every micro-batch, send more than sums in fp32 at the step's end.

    Also if gradients were to be accumulated sharded, and no ranks share them.

    Args:
        asked: as of `choose_accumulation`.
    """
    in_bf16 = choose_accumulation(asked, layout, precision, model, device)
    if asked is False and in_bf16.unsharded:
        return ["--accumulate_unsharded: False has no effect here: one rank holds each gradient whole anyway"]
    if not in_bf16.all_reduced or num_micro_batches * torch.bfloat16.itemsize <= torch.float32.itemsize:
        return []
    in_fp32 = choose_accumulation(asked, layout, replace(precision, reduce_dtype=torch.float32), model, device)
    if not in_fp32.unsharded and layout.mesh_shape[0] == 1:
        return []
    return [
        f"--reduce_dtype: bf16 sums gradients over {'ranks' if in_fp32.unsharded else 'copies'} after each of "
        f"{num_micro_batches} micro-batches, in all {num_micro_batches / 2:g} times the bytes of fp32, which this run "
        "would sum once per step; leave it out to send less"
    ]


@contextmanager
def micro_batch_context(
    model: nn.Module, accumulation: Accumulation, *, is_first: bool, is_last: bool
) -> Iterator[None]:
    """A context for one micro-batch's forward and backward that postpones every exchange it can.

    Gradients are reduced after the last one, or after each if that is how they accumulate. Weights that are kept are
    gathered and cast for the first one.

    Args:
        is_first, is_last: of its step.
    """
    if isinstance(model, DistributedDataParallel):
        if is_last:
            yield
        else:
            with model.no_sync():
                yield
        return
    if isinstance(model, FSDPModule) and (is_first or is_last):  # each call looks through all modules
        model.set_requires_gradient_sync(is_last or not accumulation.unsharded)
        model.set_requires_all_reduce(is_last or accumulation.all_reduced)
        if accumulation.keeps_weights:
            model.set_reshard_after_backward(is_last)
    yield


def reshard(model: nn.Module) -> None:
    """Shard the model again after a forward without backward, which leaves gathered parameters in memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            forget_forwards(module)


def end_backward(model: nn.Module) -> None:
    """End a backward pass that an error cut short: `fully_shard` would wait for its end in all later ones.

    Gradients that were computed are reduced, and removed.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._root_post_backward_final_callback()
    for parameter in model.parameters():
        parameter.grad = None


def own_class(model: nn.Module) -> type[nn.Module]:
    """The model's class as it was before `fully_shard`, which replaces it by a subclass."""
    bases = (base for base in type(model).__mro__ if issubclass(base, nn.Module))
    return next(base for base in bases if not issubclass(base, FSDPModule))


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel around it (`fully_shard` wraps nothing)."""
    return model.module if isinstance(model, DistributedDataParallel) else model
