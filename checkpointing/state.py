"""What a run is besides its weights: how far it came, and the tensors that a checkpoint holds, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.optim import Optimizer

from policies.adapter_kinds import own_name
from policies.sharding import unwrap

MODEL, OPTIMIZER = "model.", "optimizer.state."


@dataclass
class TrainState:
    """How far the run has come; `train()` moves it on, a checkpoint keeps it."""

    step: int = 0
    epoch: int = 1  # the one that the next step belongs to
    step_of_epoch: int = 0
    eval_due: bool = False  # what was still to be done after `step`
    epoch_end_due: bool = False
    epoch_loss_sum: float = 0.0
    epoch_label_tokens: int = 0
    epoch_seconds: float = 0.0
    num_tokens: int = 0  # seen by the run
    seconds: float = 0.0  # of steps and evaluations, over all sessions of the run
    best_eval_loss: float = math.inf
    best_step: int = 0  # after which that was

    def count_step(self, seconds: float, loss: float, num_label_tokens: int, num_tokens: int) -> None:
        """Note what the step that has just ended was; `step` counts it already."""
        self.step_of_epoch += 1
        self.epoch_loss_sum += loss * num_label_tokens
        self.epoch_label_tokens += num_label_tokens
        self.num_tokens += num_tokens
        self.count_seconds(seconds)

    def count_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        self.epoch_seconds += seconds

    def begin_next_epoch(self) -> None:
        self.epoch += 1
        self.step_of_epoch = self.epoch_label_tokens = 0
        self.epoch_loss_sum = self.epoch_seconds = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity."""
        return asdict(self) | {"best_eval_loss": self.best_eval_loss if math.isfinite(self.best_eval_loss) else None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        state = cls(**{field.name: values[field.name] for field in fields(cls)})
        if state.best_eval_loss is None:
            state.best_eval_loss = math.inf
        return state


def model_tensors(model: nn.Module, *, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Of a model with adapters these, frozen ones too; of any other every parameter and every buffer that is saved.

    So an adapter's checkpoint needs its base, and any other stands for itself.

    Args:
        every_name: a tied weight under each of its names, as a plain model's state_dict has it; else under the first.
    """
    inner = unwrap(model)
    if isinstance(inner, PeftModel):
        own = own_name(inner)
        return {MODEL + name: p.detach() for name, p in inner.named_parameters() if own in name}
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    named = parameters if every_name else dict(inner.named_parameters())
    tensors = {MODEL + name: p.detach() for name, p in named.items()}
    buffers = inner.state_dict()
    return tensors | {MODEL + name: tensor for name, tensor in buffers.items() if name not in parameters}


def optimizer_tensors_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's states, sharded as the parameters are."""
    return {
        f"{OPTIMIZER}{name}.{key}": value
        for name, parameter in trained_parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same as dictionaries in dictionaries, as torch's own tools give a checkpoint back: `state["model"][name]`.

    torch.distributed.checkpoint joins their keys again to the names that they have here.
    """
    state: dict[str, Any] = {"model": {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            state.setdefault("optimizer", {"state": {}})["state"].setdefault(parameter, {})[key] = tensor
    return state


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, in the model's order; the optimizer may have them in another, by groups."""
    return {name: parameter for name, parameter in unwrap(model).named_parameters() if parameter.requires_grad}


def optimizer_numbers(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, float]]:
    """What the optimizer's states hold besides tensors, by parameter."""
    numbers = {
        name: {
            key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, int | float)
        }
        for name, parameter in trained_parameters(model).items()
    }
    return {name: values for name, values in numbers.items() if values}
