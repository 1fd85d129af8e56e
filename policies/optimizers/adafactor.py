"""Adafactor for sharded parameters, with the rules of torch.optim.Adafactor (Shazeer & Stern, arXiv 1804.04235).

torch's own fails on sharded parameters (2.13: "in-place operations that require placement changes are not supported")
and waits for the device twice per parameter. Here a step needs two all-reduces for all parameters together, of the
sums over rows, and never waits. Statistics and arithmetic are in fp32 whatever the weights' dtype. For weights in fp32
the results match torch's up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.kind import Groups, OptimizerKind
from policies.optimizers.states import LocalOptimizer, zero_state
from utils.local_tensors import local_tensor

EPS1 = torch.finfo(torch.float32).eps  # torch's choice for fp32; its choice for bf16, 0.0078, exceeds most gradients


class Adafactor(LocalOptimizer):
    """Keeps row and column sums of squared gradients only; its learning rate is relative to each tensor's size.

    States of a matrix `[..., rows, columns]`: `row_var` `[..., rows, 1]` and `col_var` `[..., 1, columns]`; with two
    dimensions `col_var` is `[columns]`, whole on every rank. State of a vector: `variance`, of its shape.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        beta2_decay: float = -0.8,
        eps2: float = 1e-3,
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """
        Args:
            lr: relative: a tensor moves by at most lr times its root mean square, or lr * eps2 if that is larger.
            beta2_decay: step t has weight t**beta2_decay in the averages.
            d: largest root mean square of an update before it is multiplied by the rate.
        """
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps2": eps2, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Every rank must call this."""
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not work:
            return
        parameters = [parameter for parameter, _ in work]
        sums = _sum_over_shards([self._own_sums(parameter, group) for parameter, group in work], parameters)
        row_means = [self._take_sums(p, group, total) for (p, group), total in zip(work, sums, strict=True)]
        # Computed twice: keeping all updates would need as much memory as the gradients in fp32.
        updates = (self._update(parameter, mean) for parameter, mean in zip(parameters, row_means, strict=True))
        sizes = _sum_over_shards([_squared_norm(update).view(1) for update in updates], parameters)
        for (parameter, group), total, size, mean in zip(work, sums, sizes, row_means, strict=True):
            step, lr, num_elements = self.state[parameter]["step"], group["lr"], parameter.numel()
            # Of the whole tensor: total[0] is its squared norm (`_own_sums`), size[0] that of the update.
            rate = (total[0] / num_elements).sqrt().clamp(min=group["eps2"]) * min(lr, step**-0.5)
            rate /= ((size[0] / num_elements).sqrt() / group["d"]).clamp(min=1.0)
            weight = local_tensor(parameter)
            # One parameter at a time, in fp32, rounded once when it is stored.
            moved = weight.float().mul_(1 - lr * group["weight_decay"])
            weight.copy_(moved.sub_(self._update(parameter, mean).mul_(rate)))

    def _own_sums(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Update the states that depend on this rank's rows only.

        Returns:
            The sums to add up over ranks: the squared weights; for a matrix of two dimensions also `row_var`, and the
            squared gradient by column.
        """
        state, gradient = self.state[parameter], local_tensor(parameter.grad)
        if not state:
            state.update(_new_states(parameter))
        state["step"] += 1
        share = state["step"] ** group["beta2_decay"]
        sums = [_squared_norm(local_tensor(parameter)).view(1)]
        if parameter.dim() < 2:
            local_tensor(state["variance"]).lerp_(gradient.float().square(), share)
            return sums[0]
        row_var = local_tensor(state["row_var"])
        row_var.lerp_(_squared_norm(gradient, dim=-1, keepdim=True).div_(parameter.shape[-1]), share)
        if parameter.dim() == 2:
            return torch.cat([*sums, row_var.sum().view(1), _squared_norm(gradient, dim=0)])
        # Sharding cuts the first dimension, so each rank has whole matrices.
        column_means = _squared_norm(gradient, dim=-2, keepdim=True).div_(parameter.shape[-2])
        local_tensor(state["col_var"]).lerp_(column_means, share)
        return sums[0]

    def _take_sums(self, parameter: nn.Parameter, group: dict[str, Any], sums: torch.Tensor) -> torch.Tensor | None:
        """Update the states that depend on all rows; returns the mean of `row_var`, or None for a vector."""
        state = self.state[parameter]
        if parameter.dim() < 2:
            return None
        if parameter.dim() > 2:
            return local_tensor(state["row_var"]).mean(dim=-2, keepdim=True)
        num_rows = parameter.shape[0]
        state["col_var"].lerp_(sums[2:] / num_rows, state["step"] ** group["beta2_decay"])
        return sums[1] / num_rows

    def _update(self, parameter: nn.Parameter, row_mean: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of the gradient in fp32, divided by the square root of the estimated variance."""
        state = self.state[parameter]
        if row_mean is None:
            variance = local_tensor(state["variance"]).clone()
        else:
            # A column times a row: the broadcast product is the matrix product.
            variance = local_tensor(state["row_var"]) * local_tensor(state["col_var"])
            variance.div_(row_mean.clamp(min=EPS1))
        return variance.clamp_(min=EPS1**2).rsqrt_().mul_(local_tensor(parameter.grad))


def _new_states(parameter: nn.Parameter) -> dict[str, Any]:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        return {"step": 0, "variance": zero_state(parameter, shape, torch.float32)}
    column_shape = shape[1:] if len(shape) == 2 else (*shape[:-2], 1, shape[-1])
    return {
        "step": 0,
        "row_var": zero_state(parameter, (*shape[:-1], 1), torch.float32),
        "col_var": zero_state(parameter, column_shape, torch.float32),
    }


def _squared_norm(tensor: torch.Tensor, dim: int | None = None, *, keepdim: bool = False) -> torch.Tensor:
    """The sum of squares in fp32, without a copy of the tensor."""
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=keepdim, dtype=torch.float32).square_()


def _sum_over_shards(tensors: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> Sequence[torch.Tensor]:
    """Each tensor summed over the ranks that shard its parameter, in one all-reduce for all tensors."""
    first = parameters[0]
    if not isinstance(first, DTensor):
        return tensors
    together = torch.cat(list(tensors)).to(first.device_mesh.device_type)  # nccl cannot reduce host memory
    for dim, placement in enumerate(first.placements):
        if isinstance(placement, Shard) and first.device_mesh.size(dim) > 1:
            dist.all_reduce(together, group=first.device_mesh.get_group(dim))
    return together.to(tensors[0].device).split([tensor.numel() for tensor in tensors])


class AdafactorKind(OptimizerKind):
    steps_alone = False

    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        return Adafactor(groups, lr=train.lr, weight_decay=train.weight_decay)

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        if parameter.dim() < 2:
            return 4 * shape.numel()
        num_matrices = shape[:-2].numel()  # 1 for a parameter of two dimensions
        return 4 * (shape[:-1].numel() + num_matrices * shape[-1])

    def temporary_bytes(self, parts: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig) -> int:
        # One parameter at a time: the update and the moved weight in fp32.
        return 2 * 4 * max((part.numel() for part in parts), default=0)


KIND = AdafactorKind()
