"""Muon for the matrices of layers, AdamW for everything else: embeddings, head, norms, biases, experts.

torch.optim.Muon's arithmetic (Jordan, 2024, https://kellerjordan.github.io/posts/muon/), with the learning rate of Liu
et al. (2025, arXiv 2502.16982): updates are as large as AdamW's, so one --lr and --weight_decay serves both.

A matrix is made orthogonal as a whole, and torch's class knows no shards. Here the momentum of a sharded matrix is
updated in parts. Then the ranks that share it take turns: each gathers every n-th matrix, computes it, and sends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz
from torch.optim.adamw import adamw

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.kind import Groups, OptimizerKind
from policies.optimizers.states import LocalOptimizer, zero_state
from policies.weights.sources import keep_part
from utils.local_tensors import local_tensor
from utils.parameters import is_of_vocabulary

MATRICES = "matrices"  # the option of a group whose parameters Muon updates


class Muon(LocalOptimizer):
    """Groups with `matrices` set get Muon's updates, the others AdamW's."""

    def __init__(
        self, params: Groups, lr: float, *, weight_decay: float, momentum: float, betas: tuple[float, float]
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, MATRICES: False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Every rank must call this."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group[MATRICES]:
                self._step_matrices(parameters, group)
            elif parameters:
                self._step_others(parameters, group)

    def _step_matrices(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter, update in _orthogonal(parameters, (self._momentum(p, group) for p in parameters)):
            adjusted = group["lr"] * 0.2 * max(parameter.shape) ** 0.5  # torch's "match_rms_adamw"
            weight = local_tensor(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-adjusted)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of Nesterov's momentum, in bf16, as the iterations take it."""
        state, gradient = self.state[parameter], local_tensor(parameter.grad)
        if not state:
            state["momentum_buffer"] = zero_state(parameter, parameter.shape, gradient.dtype)
        buffer = local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]).bfloat16()

    def _step_others(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = 0
                state |= {
                    key: zero_state(parameter, parameter.shape, parameter.dtype) for key in ("exp_avg", "exp_avg_sq")
                }
        weights = [local_tensor(parameter) for parameter in parameters]
        gradients = [local_tensor(parameter.grad) for parameter in parameters]
        averages, squares = ([local_tensor(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        # The kernel counts these on by itself.
        steps = [torch.tensor(float(state["step"]), device=w.device) for state, w in zip(states, weights, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            gradients,
            averages,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )
        for state in states:
            state["step"] += 1


def _orthogonal(
    parameters: Sequence[nn.Parameter], momenta: Iterator[torch.Tensor]
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """This rank's part of each orthogonal update, bf16, in the order of the parameters."""
    group = _sharding_group(parameters[0]) if parameters else None
    if group is None:
        yield from ((parameter, _iterate(momentum)) for parameter, momentum in zip(parameters, momenta, strict=True))
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for first in range(0, len(parameters), size):
        some = parameters[first : first + size]
        mine: torch.Tensor | None = None
        for turn, parameter in enumerate(some):
            whole = _gathered(parameter, next(momenta))
            mine = whole if turn == rank else mine
        mine = None if mine is None else _iterate(mine)
        for turn, parameter in enumerate(some):
            whole = torch.empty(parameter.shape, dtype=torch.bfloat16, device=local_tensor(parameter).device)
            if turn == rank and mine is not None:
                whole.copy_(mine)
            dist.broadcast(whole, src=dist.get_global_rank(group, turn), group=group)
            part = torch.empty_like(parameter, dtype=torch.bfloat16)
            keep_part(part, whole)
            yield parameter, local_tensor(part)


def _sharding_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that share a parameter; None if it is whole."""
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard) and parameter.device_mesh.size(dim) > 1:
                return parameter.device_mesh.get_group(dim)
    return None


def _gathered(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    sharded = torch.empty_like(parameter, dtype=part.dtype)
    local_tensor(sharded).copy_(part)
    assert isinstance(sharded, DTensor)
    whole: torch.Tensor = sharded.full_tensor()
    return whole


def _iterate(momentum: torch.Tensor) -> torch.Tensor:
    """torch's five Newton-Schulz iterations, in bf16."""
    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    orthogonal: torch.Tensor = _zeropower_via_newtonschulz(momentum.clone(), coefficients, DEFAULT_NS_STEPS, EPS)
    return orthogonal


class MuonKind(OptimizerKind):
    steps_alone = False
    steps_whole = True

    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        betas = (train.adam_beta1, train.adam_beta2)
        momentum = train.momentum if train.momentum is not None else 0.95
        return Muon(groups, lr=train.lr, weight_decay=train.weight_decay, momentum=momentum, betas=betas)

    def options_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {MATRICES: True} if _is_matrix(parameter) else {}

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        return (1 if _is_matrix(parameter) else 2) * parameter.element_size() * shape.numel()

    def temporary_bytes(self, parts: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig) -> int:
        # One matrix at a time, in bf16: momentum, its copy, the iterate before and after, and two Gram matrices.
        matrices = [part.shape for part in parts if _is_matrix(part)]
        return max((2 * (4 * shape.numel() + 2 * min(shape) ** 2) for shape in matrices), default=0)

    def product_flops(self, parameter: torch.Tensor) -> int:
        # Of an iteration: X X^T, the square of that, and its product with X.
        shape = parameter.shape if _is_matrix(parameter) else (0, 0)
        return int(DEFAULT_NS_STEPS * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3))


def _is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and not is_of_vocabulary(parameter)


KIND = MuonKind()
