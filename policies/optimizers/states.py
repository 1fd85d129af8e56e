"""Optimizer states of dtypes and shapes of their own, laid out over the ranks as their parameters are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed.tensor
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from utils.distributed import local_tensor


@torch.no_grad()
def zero_state(
    parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A state of a parameter, all zeros, on `device` or where the parameter is.

    With as many dimensions and as many rows as the parameter it is cut into rows as the parameter is; any other state
    is whole on every rank. A checkpoint is read by the same rule, into whatever layout.
    """
    device = device or local_tensor(parameter).device
    shape = tuple(shape)
    if shape == tuple(parameter.shape):
        state = torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    elif isinstance(parameter, DTensor) and len(shape) == parameter.dim() and shape[0] == parameter.shape[0]:
        mesh, placements = parameter.device_mesh, parameter.placements
        state = torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
        if local_tensor(state).device != device:
            state = torch.empty_like(state, device=device)
    else:
        state = torch.empty(shape, dtype=dtype, device=device)
    local_tensor(state).zero_()
    return state


class LocalOptimizer(Optimizer):
    """An optimizer that steps on each rank's own part of every parameter, with plain tensors.

    Its states are what `zero_state` gives; `step`, a number, counts a parameter's updates.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast every state to its parameter's dtype, but for that."""
        super().load_state_dict(state_dict | {"state": {}})
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, parameter in zip(indices, self._parameters(), strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = self._take_up(parameter, state_dict["state"][index])

    def _take_up(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Loaded states, where this optimizer has its own."""
        device = local_tensor(parameter).device
        return {
            key: value.to(device) if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value
            for key, value in state.items()
        }

    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)
