"""The base of our own optimizers: states with their own dtypes and shapes, sharded like their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed.tensor
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from utils.local_tensors import local_tensor, plain_tensor


@torch.no_grad()
def zero_state(
    parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A state of zeros for a parameter, on `device` or on the parameter's own device.

    If the state has as many dimensions and rows as the parameter, it is sharded like the parameter. Any other state
    is whole on every rank. Checkpoints are read by the same rule, whatever the layout.
    """
    device = device or local_tensor(parameter).device
    shape = tuple(shape)
    if shape == tuple(parameter.shape):
        state = torch.empty_like(plain_tensor(parameter), dtype=dtype, device=device)
    elif isinstance(parameter, DTensor) and len(shape) == parameter.dim() and shape[0] == parameter.shape[0]:
        mesh, placements = parameter.device_mesh, parameter.placements
        state = torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
        # The mesh's device is where ranks compute; offloaded parameters live in host memory.
        if local_tensor(state).device != device:
            state = torch.empty_like(state, device=device)
    else:
        state = torch.empty(shape, dtype=dtype, device=device)
    local_tensor(state).zero_()
    return state


class LocalOptimizer(Optimizer):
    """Base of optimizers that update each rank's own part of every parameter, as plain tensors.

    States are made by `zero_state`; the number `step` counts a parameter's updates.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but keeps each state's dtype; torch's casts states to their parameter's dtype."""
        # Without states, which torch would cast; they follow below.
        super().load_state_dict(state_dict | {"state": {}})
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for index, parameter in zip(indices, self._parameters(), strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = self._restore(parameter, state_dict["state"][index])

    def _restore(self, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """The loaded states of one parameter, on this optimizer's device."""
        device = local_tensor(parameter).device
        return {
            key: value.to(device) if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value
            for key, value in state.items()
        }

    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)
