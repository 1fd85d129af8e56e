"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from policies.optimizers.compiled_adamw import CompiledAdamW
from policies.optimizers.host_weights import HostWeightsOptimizer
from utils.local_tensors import local_tensor


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    scale: float = 1.0,
    optimizer: Optimizer | None = None,
) -> torch.Tensor:
    """Divide gradients by `scale`, clip them, and return their global 2-norm before clipping.

    If the optimizer can divide gradients in its own pass over them, as torch's fused ones can, its next step does so.
    If it has begun its step in backward, it has measured them before.

    The norm is accumulated in fp32 whatever the gradients' dtype (torch.nn.utils would round each tensor's norm to
    bf16), from the local shards, with one all-reduce of one number.

    Args:
        parameters: the trained ones. Either all are whole on every rank, or all are DTensors of the same mesh; their
            gradients may be in host memory even if the mesh is one of GPUs.
        max_norm: a larger norm is scaled down to this; None: no clipping.
        scale: the factor by which the loss was multiplied (`policies.loss_scaling`).
        optimizer: what these gradients are for; None: they are changed here.

    Returns:
        fp32 scalar, the norm without `scale`, the same on every rank, on the device of the mesh or else of the
        gradients. It is not finite if any gradient is not; the gradients are useless then.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local_tensor(gradient) for gradient in gradients]
    on_host = isinstance(optimizer, HostWeightsOptimizer)
    norms = optimizer.gradient_norms() if isinstance(optimizer, HostWeightsOptimizer) else None
    if norms is None:
        total = sum_of_squares(shards, in_kernel=isinstance(optimizer, CompiledAdamW))
    else:
        total = torch.stack(norms).square().sum()
    if isinstance(gradients[0], DTensor):
        mesh, placements = gradients[0].device_mesh, gradients[0].placements
        total = total.to(mesh.device_type)  # nccl cannot reduce host memory
        for dim, placement in enumerate(placements):
            # Copies of a shard (Replicate) are equal: summing over them, too, would count each shard several times.
            if isinstance(placement, Shard):
                dist.all_reduce(total, group=mesh.get_group(dim))
    norm = total.sqrt() / scale
    divisor = None
    if max_norm is not None or scale != 1.0:
        # Like torch.nn.utils.clip_grads_with_norm_: no branch on the value, so no wait for the device.
        excess = torch.ones_like(norm) if max_norm is None else torch.clamp((norm + 1e-6) / max_norm, min=1.0)
        # Offloaded gradients are in host memory, and are divided there.
        divisor = (excess * scale).to(shards[0].device)
    # torch's name for it (torch.amp.GradScaler.step)
    if on_host or getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor  # type: ignore[union-attr]
    elif divisor is not None:
        torch._foreach_div_(shards, divisor)  # as torch's fused kernels do, to the bit in fp32
    return norm


def sum_of_squares(tensors: Sequence[torch.Tensor], *, in_kernel: bool) -> torch.Tensor:
    """The squares of all numbers, summed in fp32.

    Args:
        in_kernel: tensors on a GPU are read by policies/gradient_norm_kernel.py, in 0.6 of the time that torch's kernel
            takes on an H200.

    Returns:
        []
    """
    rest, sums = list(tensors), []
    if in_kernel and rest[0].is_cuda:
        from policies.gradient_norm_kernel import fits, sum_in_kernel  # needs Triton

        read: list[torch.Tensor] = []
        rest = []
        for tensor in tensors:
            (read if tensor.dtype == tensors[0].dtype and fits(tensor) else rest).append(tensor)
        if read:
            sums.append(sum_in_kernel(read))
    if rest:
        norms = torch._foreach_norm(rest, 2, dtype=torch.float32)
        sums.append(torch.stack(norms).square().sum())
    return torch.stack(sums).sum()
