"""Weights gathered from each shard right into its whole parameter, and gradients reduced from where they lie.

torch has no public way: a custom all-gather of `FSDPModule` is given the packed buffer. So this replaces methods of the
single parameter groups (`utils.torch_internals.parameter_groups`) of torch 2.11 to 2.13, whose fields it reads. A group
that it does not know stays as it is.

Streams and memory, on a GPU:

- Whole weights are allocated on the stream that gathers them. Forward frees a layer's one layer later: its memory may
  be written again only once computing has read it, and if that were waited for at once, no gather would run next to
  computing. So two layers are whole at a time, where torch holds one of them and up to two buffers.
- Gradients stay where they are until their reduction has read them, as torch's buffer would: computing waits for it
  before the next unit's reduction, and at the end of backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGatherResult,
    _div_if_needed,
    _get_gradient_divide_factors,
    _get_param_all_gather_inputs,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.profiler import record_function

from policies.direct_collectives import ROUNDED, direct_line, why_not_reduced
from utils.torch_internals import (
    all_gather_each,
    all_parameter_groups,
    begin_scattering,
    end_scattering,
    reduce_scatter_each,
)


def send_directly(model: nn.Module) -> None:
    """Let the units of a sharded model be gathered and reduced without packing, where they can be.

    Call it once the model has its weights, before its first forward pass. Every rank must.
    """
    resharded = _Resharded()
    for group in all_parameter_groups(model):
        gather, reduction = _why_not(group)
        if gather is None:
            DirectGather(group, resharded)
        if reduction is None:
            DirectReduction(group)


def direct_notes(model: nn.Module) -> list[str]:
    """The line to print of a model for which `send_directly` was called."""
    return [direct_line([_why_not(group) for group in all_parameter_groups(model)])]


def _why_not(group: Any) -> tuple[str | None, str | None]:
    """Why a group is not gathered directly, and why not reduced; None: it is. "": it has nothing to reduce."""
    parameters = [its.sharded_param for its in group.fsdp_params]
    trains = any(parameter.requires_grad for parameter in parameters)
    if (reason := _why_not_gathered(group)) is not None:
        return reason, reason if trains else ""
    if not trains:
        return None, ""
    policy, mesh = group.mp_policy, group.mesh_info.mesh
    mesh_shape = (1, mesh.size()) if mesh.ndim == 1 else (mesh.size(0), mesh.size(1))
    computed = policy.param_dtype or next(p.dtype for p in parameters if p.requires_grad)
    return None, why_not_reduced(parameters, mesh_shape, policy.reduce_dtype or computed, policy.param_dtype)


def _why_not_gathered(group: Any) -> str | None:
    if any(not hasattr(group, name) for name in _OF_GROUPS) or not isinstance(group.mesh_info, FSDPMeshInfo):
        return f"torch {torch.__version__} has other units"
    if group.mesh_info.shard_mesh_size == 1:
        return "each rank has all weights"
    if len(group.modules) > 1 or getattr(group, "_num_param_groups", 1) > 1 or group._use_post_forward_mesh:
        return "a unit is gathered in several parts"
    if any(its.offload_to_cpu for its in group.fsdp_params):
        return "weights are in host memory"
    if any(hasattr(its._sharded_local_tensor, "fsdp_pre_all_gather") for its in group.fsdp_params):
        return ROUNDED
    if any(its.is_dtensor or its.fsdp_placement.dim != 0 for its in group.fsdp_params):
        return "weights are not cut by rows"
    return None


_OF_GROUPS = (
    *("_all_gather_comm", "_all_gather_result", "_post_reduce_event", "_reduce_scatter_comm"),
    *("_sharded_state", "_to_sharded", "_to_unsharded", "_training_state", "_wait_for_post_backward", "comm_ctx"),
    *("device_handle", "finalize_backward", "fsdp_params", "post_backward", "reshard", "unshard", "wait_for_unshard"),
)


class _Resharded:
    """The group that forward has resharded last: its whole weights are not freed yet."""

    group: DirectGather | None = None

    def free(self) -> None:
        if self.group is not None:
            self.group.free()
        self.group = None


class DirectGather:
    """Gathers a group's weights. Its methods stand for those of torch's group of the same names."""

    def __init__(self, group: Any, resharded: _Resharded) -> None:
        """
        Args:
            resharded: shared by all groups of a model.
        """
        self.group, self.resharded = group, resharded
        self.stream: Any = None  # on which the whole weights were allocated
        self.read: Any = None  # the event after which computing does not read them; None on a CPU
        self._reshard, self._finalize_backward = group.reshard, group.finalize_backward
        group.unshard, group.wait_for_unshard = self.unshard, self.wait_for_unshard
        group.reshard, group._to_sharded = self.reshard, self._to_sharded
        group.finalize_backward = self.finalize_backward

    def unshard(self, async_op: bool = False) -> None:
        """Queue the gather. `wait_for_unshard` lets computing wait for it."""
        group, state = self.group, self.group._training_state
        skips = state == TrainingState.PRE_BACKWARD and not group.unshard_in_backward
        if group._all_gather_result is not None or group.is_unsharded or skips:
            return
        # In forward the layer before may still compute, and this gather should not wait for it.
        if state != TrainingState.FORWARD or self.resharded.group is self:
            self.resharded.free()
        # Weights that an optimizer in host memory sends back arrive on the first of these streams.
        prepares, self.stream = group.comm_ctx.get_all_gather_streams(async_op, state)
        self.stream.wait_stream(prepares)
        with record_function(group._with_fqn("FSDP::all_gather")), group.device_handle.stream(self.stream):
            whole = self._gather()
            group._all_gather_result = AllGatherResult(whole, self.stream.record_event(), None, [], [], [])

    @torch.no_grad()
    def _gather(self) -> torch.Tensor:
        """Gather all weights. Returns one of them, whole."""
        group, process_group = self.group, self.group._all_gather_process_group
        shards = [shard for (shard,) in _get_param_all_gather_inputs(group.fsdp_params)]  # cast, if the policy casts
        for its, shard in zip(group.fsdp_params, shards, strict=True):
            its.init_all_gather_outputs([shard.numel()], [shard.dtype], process_group.size(), group.device)
            its.alloc_all_gather_outputs()
        wholes = [its.all_gather_outputs[0] for its in group.fsdp_params]
        # Autograd has saved these weights, and they are the same again.
        unchanged = tuple(whole for whole in wholes if not whole.is_inference())
        if len({shard.dtype for shard in shards}) > 1:  # one call of NCCL has one dtype
            shards = [shard.view(torch.uint8) for shard in shards]
        gather_each = getattr(group._all_gather_comm, "each", all_gather_each)  # reporting/ times it
        with torch.autograd._unsafe_preserve_version_counter(unchanged):
            gather_each([whole.view(shards[0].dtype) for whole in wholes], shards, process_group)
        return wholes[0]

    def wait_for_unshard(self) -> None:
        group, context = self.group, self.group.comm_ctx
        if group._all_gather_result is None:
            return
        if group._training_state == TrainingState.FORWARD and context.all_gather_state is not None:
            # The buffer of a group that torch itself gathered.
            group._wait_all_gather_streams_on_event(context.all_gather_state.event)
            context.all_gather_state = None
        group.device_handle.current_stream().wait_event(group._all_gather_result.all_gather_event)
        for its in group.fsdp_params:
            its.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = None

    def reshard(self) -> None:
        self.resharded.free()  # also where the root, which stays whole, ends its forward
        self._reshard()

    def _to_sharded(self) -> None:
        group = self.group
        if group.is_sharded:
            return
        for its in group.fsdp_params:  # as `FSDPParam.to_sharded`, without freeing
            its._setattr_on_modules(its.sharded_param)
            its.sharded_state = ShardedState.SHARDED
        group._sharded_state = ShardedState.SHARDED
        self.read = group.device_handle.current_stream().record_event()
        if group._training_state == TrainingState.FORWARD:
            self.resharded.group = self
        else:
            self.free()

    def free(self) -> None:
        """Free the whole weights. Their memory is written again after computing has read it."""
        self.stream.wait_event(self.read)
        for its in self.group.fsdp_params:
            its.free_unsharded_param()

    def finalize_backward(self) -> None:
        was_not_needed = self.group._all_gather_result is not None
        self._finalize_backward()  # waits for such a gather, and forgets it
        self.resharded.free()
        if was_not_needed:
            self.read = self.group.device_handle.current_stream().record_event()
            self.free()


class DirectReduction:
    """Reduces a group's gradients, in place of its `post_backward`, which does all else."""

    def __init__(self, group: Any) -> None:
        self.group, self._post_backward = group, group.post_backward
        group.post_backward = self.post_backward

    def post_backward(self, *unused: Any) -> None:
        group = self.group
        # Without a reduction, gradients are added up where they are until the step's last micro-batch.
        having = [its for its in group.fsdp_params if group.reduce_grads and _has_gradient(its)]
        gradients = [its.unsharded_param.grad.contiguous() for its in having]
        for its in having:
            its.unsharded_param.grad = None
        self._post_backward(*unused)  # finds no gradients, and reshards
        if having:
            with record_function(group._with_fqn("FSDP::post_backward_reduce")), torch.no_grad():
                end_scattering(group)  # of the unit before, whose gradients are freed
                group._wait_for_post_backward()
                self._reduce(having, gradients)

    def _reduce(self, having: list[Any], gradients: list[torch.Tensor]) -> None:
        """Sum gradients over the ranks, as torch's `foreach_reduce` does."""
        group, process_group = self.group, self.group._reduce_scatter_process_group
        dtype, size = gradients[0].dtype, process_group.size()
        # What divides before the sum is for fp16 alone.
        _, divisor, op, _ = _get_gradient_divide_factors(
            *(process_group, None, dtype, group.device.type),
            *(group.gradient_divide_factor, group.force_sum_reduction_for_comms),
        )
        sizes = [gradient.numel() // size for gradient in gradients]
        stream, comm = group.comm_ctx.reduce_scatter_stream, group._reduce_scatter_comm
        stream.wait_stream(group.device_handle.current_stream())
        with group.device_handle.stream(stream):
            reduced = comm.allocate((sum(sizes),), dtype=dtype, device=group.device)
            flat = [gradient.view(-1) for gradient in gradients]
            getattr(comm, "each", reduce_scatter_each)(list(reduced.split(sizes)), flat, process_group, op)
            has_read = stream.record_event()
            _div_if_needed(reduced, divisor)
            _add(having, reduced.to(group._orig_dtype), sizes)
            group._post_reduce_event = stream.record_event()
        begin_scattering(group, gradients, has_read, stream)


def _has_gradient(its: Any) -> bool:
    return hasattr(its, "_unsharded_param") and its.unsharded_param.grad is not None


def _add(having: list[Any], reduced: torch.Tensor, sizes: list[int]) -> None:
    """Add each parameter's part of the sums to its gradient, or make it its gradient."""
    at = 0
    for its, size in zip(having, sizes, strict=True):
        part = torch.as_strided(reduced, its.sharded_size, its.contiguous_sharded_stride, at)
        parameter, at = its.sharded_param, at + size
        if parameter.grad is not None:
            parameter.grad._local_tensor += part
        else:
            parameter.grad = its.to_sharded_dtensor(part)
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)
