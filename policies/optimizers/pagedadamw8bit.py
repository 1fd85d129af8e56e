"""AdamW8bit with states in managed memory, which the driver moves between the GPU and the host as needed."""

from __future__ import annotations

from torch.optim import Optimizer

from configs.fsdp import FsdpConfig
from configs.training import TrainConfig
from policies.optimizers.adamw8bit import AdamW8bitKind, PagedAdamW8bit
from policies.optimizers.kind import Groups
from ranks.environment import Environment
from utils.errors import ConfigError


class PagedAdamW8bitKind(AdamW8bitKind):
    paged = True

    def build(self, groups: Groups, train: TrainConfig, fsdp: FsdpConfig) -> Optimizer:
        betas = (train.adam_beta1, train.adam_beta2)
        return PagedAdamW8bit(groups, lr=train.lr, weight_decay=train.weight_decay, betas=betas)

    def check(self, name: str, env: Environment) -> None:
        if env.device.type != "cuda":
            raise ConfigError(
                "--optimizer: PagedAdamW8bit moves its states between the memory of a GPU and the host's, and there is "
                "no GPU here; give AdamW8bit"
            )
        super().check(name, env)


KIND = PagedAdamW8bitKind()
