"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from utils.distributed import local_tensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None, *, scale: float = 1.0) -> torch.Tensor:
    """The 2-norm of all gradients together, over all ranks, before clipping; gradients are unscaled and clipped.

    Accumulated in fp32 whatever the gradients' dtype (torch.nn.utils would round every tensor's norm to bf16), on the
    local shards at once, with one all-reduce of one number.

    Args:
        parameters: those that are trained; each either whole on every rank, or a DTensor of one and the same mesh,
            whose gradients may be in host memory while the mesh is one of GPUs.
        max_norm: gradients are scaled down to it where their norm is larger; None leaves them.
        scale: what the loss was multiplied by (`policies.loss_scaling`); gradients are divided by it.

    Returns:
        fp32 scalar, of the gradients without the scale, the same on every rank, on the device of the mesh (of the
        gradients where there is none). Not finite where any gradient is not; these are of no use then.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local_tensor(gradient) for gradient in gradients]
    norms = torch._foreach_norm(shards, 2, dtype=torch.float32)
    total = torch.stack(norms).square().sum()
    if isinstance(gradients[0], DTensor):
        mesh, placements = gradients[0].device_mesh, gradients[0].placements
        total = total.to(mesh.device_type)  # nccl reduces nothing in host memory
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dist.all_reduce(total, group=mesh.get_group(dim))
    norm = total.sqrt() / scale
    if max_norm is not None:
        # As torch.nn.utils.clip_grads_with_norm_: no branch on the value, so no wait for the device.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / scale
        torch._foreach_mul_(shards, factor.to(shards[0].device))
    elif scale != 1.0:
        torch._foreach_mul_(shards, 1.0 / scale)
    return norm
