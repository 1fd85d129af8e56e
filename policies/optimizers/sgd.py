"""torch's SGD with momentum: the shortest example of an optimizer's file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import SGD, Optimizer

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.kind import Groups, OptimizerKind


class SGDKind(OptimizerKind):
    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        # foreach: torch 2.13 has no sharding rule for the fused kernel of SGD.
        return SGD(groups, lr=train.lr, weight_decay=train.weight_decay, momentum=train.momentum or 0.0, foreach=True)

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        return parameter.element_size() * shape.numel() if train.momentum else 0

    def temporary_bytes(self, parts: Sequence[torch.Tensor], train: TrainConfig, fsdp: FsdpConfig) -> int:
        # With weight decay, foreach makes a new list of gradients (torch/optim/sgd.py, `_multi_tensor_sgd`).
        return sum(part.nbytes for part in parts) if train.weight_decay else 0


KIND = SGDKind()
