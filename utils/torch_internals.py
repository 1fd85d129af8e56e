"""Private calls of torch.distributed, all in one place.

Look here first if a new version of torch breaks a run's start, its supervision, or its figures of communication.
policies/direct_transfers.py has more, for --direct_collectives alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from utils.compat import all_gather, reduce_scatter

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process, those of device meshes included."""
    return list(dist.distributed_c10d._world.pg_map)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name: operators take no groups among their arguments."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # torch 2.13 has a type of its own for names
    group: dist.ProcessGroup = resolve(name)
    return group


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time limit of the collectives of a group that exists already."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def num_entered(group: dist.ProcessGroup) -> int:
    """The number of collectives of the group that this rank has entered. Any thread may call this."""
    total = 0
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        total += backend._get_sequence_number_for_group()
    return total


def recorded_collectives() -> dict[str, bytes]:
    """The last collectives by torch's flight recorder, for each backend.

    "nccl" is a pickle that `torchfrtrace` reads, "gloo" is JSON. A build without NCCL has "gloo" alone.
    """
    dumps = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace_json"}
    traces = {backend: getattr(c10d, name)() for backend, name in dumps.items() if hasattr(c10d, name)}
    return {name: trace.encode() if isinstance(trace, str) else trace for name, trace in traces.items()}


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """The parameter groups that `fully_shard` gathers and reduces for this unit; none if inner units hold them all.

    Each waits in `wait_for_unshard`, `post_backward` and `finalize_backward`. Up to torch 2.12 there is at most one, in
    `_fsdp_param_group`.
    """
    state: Any = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def all_parameter_groups(model: nn.Module) -> list[Any]:
    """The parameter groups of all units of a model; none if it is not sharded."""
    from torch.distributed.fsdp import FSDPModule

    return [group for unit in model.modules() if isinstance(unit, FSDPModule) for group in parameter_groups(unit)]


def call_after_reduction(group: Any, call: Callable[[list[nn.Parameter], torch.cuda.Event | None], None]) -> None:
    """Let a parameter group call this whenever backward has queued the sums of its gradients over ranks.

    It passes its sharded parameters, and an event of its device: after it their gradients are in host memory, if that
    is where they go. (A hook of a parameter would make torch 2.13 wait for each copy.)
    """
    post_backward = group.post_backward

    def and_call(*unused: Any) -> None:
        post_backward(*unused)
        event = group._post_reduce_event if group.device.type == "cuda" else None
        call([parameter.sharded_param for parameter in group.fsdp_params], event)

    group.post_backward = and_call


def gathering_stream(model: nn.Module) -> torch.cuda.Stream | None:
    """The stream on which `fully_shard` reads the sharded weights of this model; None before its first forward pass,
    and for a model that is not sharded."""
    find_state: Any = getattr(model, "_get_fsdp_state", None)
    state = None if find_state is None else find_state()
    stream = None if state is None else getattr(state._comm_ctx, "all_gather_copy_in_stream", None)
    return stream if isinstance(stream, torch.cuda.Stream) else None


def reduce_scatter_of(group: Any) -> Any:
    """What reduces a unit's gradients: torch's own, or what `set_custom_reduce_scatter` was given."""
    return group._reduce_scatter_comm


def forget_forwards(unit: FSDPModule) -> None:
    """Let the next backward prefetch nothing for forward passes that had no backward.

    torch notes each forward pass of a unit until a backward ends, and prefetches in backward what was noted before. So
    after an evaluation it would gather the unit that came last there. If ranks had not made the same passes, as in
    generation with whole weights, some would gather what others do not, and wait for ever.
    """
    for group in parameter_groups(unit):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def no_scattering_pending(group: Any) -> bool:
    """Whether computing has waited for every reduce-scatter so far. torch 2.11 holds one, torch 2.13 a list."""
    context = group.comm_ctx
    name = "reduce_scatter_states" if hasattr(context, "reduce_scatter_states") else "reduce_scatter_state"
    return not getattr(context, name)


def end_scattering(group: Any) -> None:
    """Let computing wait for the reduce-scatter before, and free what it has read."""
    context, computing = group.comm_ctx, group.device_handle.current_stream()
    several = hasattr(context, "reduce_scatter_states")
    for state in context.reduce_scatter_states if several else filter(None, [context.reduce_scatter_state]):
        if state.event is not None:
            computing.wait_event(state.event)
    if several:
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None


def begin_scattering(group: Any, read: Sequence[torch.Tensor], has_read: Any, stream: Any) -> None:
    """Keep the tensors that a queued reduce-scatter reads until computing has waited for it.

    Args:
        has_read: the event after which it has read them.
        stream: that adds its sums to gradients; the group's `_post_reduce_event` is the end of it.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import ReduceScatterState

    context = group.comm_ctx
    state = ReduceScatterState(read, has_read)  # type: ignore[arg-type]  # torch only keeps it
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.append(state)
        context._last_post_reduce_events[stream] = group._post_reduce_event  # what torch 2.13 waits for at the end
    else:
        context.reduce_scatter_state = state


def all_gather_each(wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gather each tensor's parts, of one dtype, from all ranks: on a GPU in one call of NCCL."""
    with _as_one_call(group, parts[0].device):
        for whole, part in zip(wholes, parts, strict=True):
            all_gather(whole, part, group)


def reduce_scatter_each(
    parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group: dist.ProcessGroup, op: Any
) -> None:
    """Reduce each tensor over the ranks, and give each rank its part: on a GPU in one call of NCCL."""
    with _as_one_call(group, wholes[0].device):
        for part, whole in zip(parts, wholes, strict=True):
            reduce_scatter(part, whole, group, op=op)


@contextmanager
def _as_one_call(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with dist._coalescing_manager(group=group, device=device, async_ops=False):
        yield


def time_backward(model: DistributedDataParallel) -> None:
    """Let DistributedDataParallel time every backward until `backward_seconds`; by default it times every 100th."""
    model._set_ddp_runtime_logging_sample_rate(1)


def backward_seconds(model: DistributedDataParallel) -> tuple[float, float]:
    """Seconds of communication in the last backward, and the part of them after computing had ended.

    `time_backward` must have been called before that backward. On GPUs events of the computing stream measure both.
    """
    logger: Any = model.logger
    logger.set_runtime_stats_and_log()  # otherwise the next forward does; it skips backwards that are not timed
    model._set_ddp_runtime_logging_sample_rate(100)  # torch's default
    figures = model._get_ddp_logging_data()
    communicated = int(figures["backward_comm_time"])  # in nanoseconds
    return communicated / 1e9, (communicated - int(figures["backward_compute_comm_overlap_time"])) / 1e9
