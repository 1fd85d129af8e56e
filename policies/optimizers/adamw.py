"""torch's AdamW, fused, or with its large tensors updated by a compiled kernel (--compile_optimizer)."""

from __future__ import annotations

import torch
from torch.optim import AdamW, Optimizer

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.compiled_adamw import CompiledAdamW
from policies.optimizers.kind import Groups, OptimizerKind


class AdamWKind(OptimizerKind):
    clips_in_step = True
    loses_small_updates = True

    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        lr, weight_decay, betas = train.lr, train.weight_decay, (train.adam_beta1, train.adam_beta2)
        if fsdp.compile_optimizer:
            return CompiledAdamW(groups, lr=lr, weight_decay=weight_decay, betas=betas)
        return AdamW(groups, lr=lr, weight_decay=weight_decay, betas=betas, fused=True)

    def state_bytes(self, parameter: torch.Tensor, shape: torch.Size, train: TrainConfig, fsdp: FsdpConfig) -> int:
        return 2 * parameter.element_size() * shape.numel()


KIND = AdamWKind()
