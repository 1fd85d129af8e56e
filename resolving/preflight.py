"""Refuses flags that cannot hold on this machine or with these ranks, before any weight is read."""

from __future__ import annotations

import torch

from configs.run import RunConfig
from evaluation.measures import check_measures
from policies.optimizers.kind import kind_of
from ranks.environment import Environment
from reporting.trackers import PACKAGES as TRACKER_PACKAGES
from resolving.sizes import check_workers
from utils.errors import ConfigError
from utils.optional_packages import check_installed
from utils.wording import plural


def check_environment(config: RunConfig, env: Environment) -> None:
    """Refuse settings that cannot run here. Reads and writes no weight and no data.

    Raises:
        ConfigError: with the flag, the reason and the remedy.
    """
    train = config.train_config
    if train.one_gpu and env.world_size > 1:
        raise ConfigError(f"--one_gpu: {env.world_size} processes were started; start one, or leave the flag out")
    if train.enable_fsdp and not env.launched:
        raise ConfigError(
            "--enable_fsdp: needs torchrun; start with: torchrun --nproc_per_node NUMBER_OF_GPUS finetuning.py "
            "--enable_fsdp ..."
        )
    if torch.cuda.is_available() and env.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"--nproc_per_node: {env.local_world_size} processes on this machine, but it has "
            f"{plural(torch.cuda.device_count(), 'GPU')}; start one process per GPU"
        )
    check_workers(train, env)
    for name, package in TRACKER_PACKAGES.items():
        if getattr(config.tracking_config, name):
            check_installed(f"--{name}", package)
    check_measures(train)
    kind_of(config.fsdp_config.optimizer).check(config.fsdp_config.optimizer, env)
