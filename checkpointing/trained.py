"""The state that training changes, and its names in a checkpoint: "model.NAME", "optimizer.state.NAME.KEY"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from policies.adapters.adapted_model import has_adapter, is_own_name
from policies.loss_scaling import LossScaler
from policies.routing.expert_loads import Routing
from policies.sharding import unwrap
from policies.weights.tensor_names import saved_buffers
from utils.local_tensors import plain_tensor

MODEL, OPTIMIZER = "model.", "optimizer.state."


@dataclass(frozen=True)
class Trained:
    """The objects whose state a checkpoint keeps."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: LossScaler
    routing: Routing = field(default_factory=Routing, kw_only=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of model, optimizer and routing, those of model and optimizer sharded as the model is."""
        return model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer) | self.routing.tensors()

    def values(self) -> dict[str, Any]:
        """All other state, as JSON values."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "loss_scaler": self.scaler.state_dict(),
            "optimizer_numbers": optimizer_numbers(self.model, self.optimizer),
        }


def saved_tensors(model: nn.Module, *, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Adapter tensors if there are any, frozen ones too; otherwise all parameters and saved buffers.

    So a checkpoint of an adapter needs its base, and any other checkpoint stands for itself.

    Args:
        every_name: list a tied weight under each of its names, as a plain model's state_dict does, not only the first.
    """
    inner = unwrap(model)
    if has_adapter(inner):
        return {name: p.detach() for name, p in inner.named_parameters() if is_own_name(inner, name)}
    tensors = {name: plain_tensor(p) for name, p in inner.named_parameters(remove_duplicate=not every_name)}
    state = inner.state_dict()
    return tensors | {name: state[name] for name in saved_buffers(inner)}


def model_tensors(model: nn.Module, *, every_name: bool = False) -> dict[str, torch.Tensor]:
    """`saved_tensors` by their names in a checkpoint."""
    return {MODEL + name: tensor for name, tensor in saved_tensors(model, every_name=every_name).items()}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state tensors, sharded as the parameters are."""
    return {
        f"{OPTIMIZER}{name}.{key}": value
        for name, parameter in trained_parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_numbers(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, float]]:
    """Numbers in the optimizer's states, by parameter, such as Adam's count of steps."""
    numbers = {
        name: {
            key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, int | float)
        }
        for name, parameter in trained_parameters(model).items()
    }
    return {name: values for name, values in numbers.items() if values}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, in the model's order; the optimizer may have them in another, by groups."""
    return {name: parameter for name, parameter in unwrap(model).named_parameters() if parameter.requires_grad}
