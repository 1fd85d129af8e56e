"""The base class of an optimizer's file: how it is built, and its properties that runs and plans need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from configs.optimizers import OPTIMIZERS
from configs.training import TrainConfig
from ranks.environment import Environment

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them."""


class OptimizerKind(ABC):
    """One optimizer of --optimizer. Its file in policies/optimizers/ ends with an object of a subclass, `KIND`.

    `build` and `state_bytes` are all that it needs; everything else has a default that holds for most.
    """

    eight_bit = False
    """Its states have 8 bits, so a plan does not suggest 8-bit states to save memory."""

    paged = False
    """Its states leave the GPU if its memory is full, so a plan does not count them there."""

    clips_in_step = False
    """Its kernels divide gradients while they update (torch's `_step_supports_amp_scaling`), so that clipping costs no
    pass of its own."""

    loses_small_updates = False
    """Its updates are about as large as the learning rate, so bf16 weights round them away if they are far larger."""

    steps_alone = True
    """Its step asks no other rank, so a thread can make it beside the collectives of backward."""

    steps_whole = False
    """The ranks that share a parameter take turns in gathering it whole, in bf16, and in sending what it becomes."""

    @abstractmethod
    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        """The optimizer of these parameters, which may be DTensors."""

    @abstractmethod
    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        """Bytes of its states after the first step, without single numbers.

        Args:
            parameter: the whole parameter, perhaps on the meta device.
            shape: of the part of it whose states are counted.
        """

    def options_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The options of the group that this parameter belongs to, for an optimizer that does not treat all alike."""
        return {}

    def has_states_of(self, other: OptimizerKind) -> bool:
        """Whether the other one keeps the same states, so that it can go on with the other's checkpoints."""
        return type(self) is type(other)

    def temporary_bytes(self, parts: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig) -> int:
        """Bytes that a step on a GPU allocates and frees again; 0 for kernels that update in place.

        Args:
            parts: this rank's parts of the trained parameters, on the meta device; whole ones if `steps_whole`.
        """
        return 0

    def product_flops(self, parameter: torch.Tensor) -> int:
        """FLOPs of the matrix products, in bf16, that update a whole parameter; 0 for updates of single numbers."""
        return 0

    def check(self, name: str, env: Environment) -> None:  # noqa: B027 - by default it runs on every machine
        """Refuse a machine that it cannot run on.

        Raises:
            ConfigError: if it cannot.
        """

    def notes(self, trained: Sequence[nn.Parameter]) -> Iterator[str]:
        """Lines to print once weights are there."""
        yield from ()


def kind_of(name: str) -> OptimizerKind:
    """The kind of this name. Its file is imported now, so a run needs the packages of its own optimizer alone."""
    assert name in OPTIMIZERS, name
    kind = import_module(f"policies.optimizers.{name.lower()}").KIND
    assert isinstance(kind, OptimizerKind)
    return kind
