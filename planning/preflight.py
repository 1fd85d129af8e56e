"""What can be refused before any weight is read: the flags against this machine, these ranks and these folders."""

from __future__ import annotations

from typing import Any

import torch

from configs.fsdp import OPTIMIZERS_IN_8BIT
from configs.run import RunConfig
from configs.training import DEFAULT_CONTEXT_LENGTH
from data.loader import BatchLayout
from policies.adapters import num_virtual_tokens
from reporting.profiling import num_steps_needed
from reporting.run_folder import check_run_folder
from reporting.trackers import check_packages
from utils.bitsandbytes_import import import_bitsandbytes
from utils.environment import Environment
from utils.errors import ConfigError


def check_environment(config: RunConfig, env: Environment) -> None:
    """Refuse what cannot run here. Reads and writes no weight and no data.

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
            f"{torch.cuda.device_count()} GPU(s); start one process per GPU"
        )
    check_packages(config)
    _check_optimizer(config, env)
    check_run_folder(config)


def _check_optimizer(config: RunConfig, env: Environment) -> None:
    name = config.fsdp_config.optimizer
    if name == "PagedAdamW8bit" and env.device.type != "cuda":
        raise ConfigError(
            "--optimizer: PagedAdamW8bit moves its states between the memory of a GPU and the host's, and there is no "
            "GPU here; give AdamW8bit"
        )
    if name in OPTIMIZERS_IN_8BIT:
        import_bitsandbytes(f"--optimizer {name}")


def batch_layout(config: RunConfig, env: Environment, resumed_size: int | None) -> tuple[BatchLayout, list[str]]:
    """How the global batch is cut over these ranks, and lines to print.

    Args:
        resumed_size: rows of the global batch of the checkpoint that the run goes on from: it stays as it is.

    Raises:
        ConfigError: where the global batch does not divide.
    """
    train = config.train_config
    if train.global_batch_size is None and resumed_size is None:
        return BatchLayout(train.batch_size_training, train.gradient_accumulation_steps, env.world_size), []
    size = train.global_batch_size or resumed_size
    if resumed_size is not None and size != resumed_size:
        raise ConfigError(
            f"--global_batch_size: the checkpoint was trained with {resumed_size} rows per optimizer step, and its "
            f"place in the data is counted in these; give {resumed_size}, or leave it out"
        )
    assert size is not None
    accumulation, rest = divmod(size, train.batch_size_training * env.world_size)
    if rest or not accumulation:
        flag = "--global_batch_size: " if resumed_size is None else "--resume: the checkpoint's global batch of "
        raise ConfigError(
            f"{flag}{size} rows is no multiple of {train.batch_size_training} (batch_size_training) x "
            f"{env.world_size} ranks; give another --batch_size_training"
        )
    notes = []
    if train.global_batch_size is None and accumulation != train.gradient_accumulation_steps:
        notes = [
            f"gradient_accumulation_steps: {accumulation} instead of {train.gradient_accumulation_steps}: a resumed "
            f"run keeps its global batch of {size} rows"
        ]
    return BatchLayout(train.batch_size_training, accumulation, env.world_size), notes


def resolve_num_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        ConfigError: where it ends before what it was asked to record.
    """
    train, tracking = config.train_config, config.tracking_config
    num_steps = steps_per_epoch * train.num_epochs
    if train.max_train_step:
        num_steps = min(num_steps, train.max_train_step)
    needed = num_steps_needed(tracking)
    if num_steps < needed:
        remedy = "raise --max_train_step" if train.max_train_step == num_steps else "raise --num_epochs"
        if tracking.use_profiler:
            raise ConfigError(
                f"--use_profiler: the run has {num_steps} optimizer steps, and needs more than {needed - 1} for the "
                f"profiler to wait, warm up and record; {remedy}, or leave it out"
            )
        raise ConfigError(
            f"--flop_counter_start: the run has {num_steps} optimizer steps, so step {needed} would never be counted; "
            f"{remedy}, or give --flop_counter_start {num_steps}"
        )
    return num_steps


def resolve_context_length(config: RunConfig, model_config: Any) -> tuple[int, list[str]]:
    """Tokens of the longest row, and lines to print: the default shrinks to what the model has positions for.

    Raises:
        ConfigError: where a length was asked for that the model does not have.
    """
    asked, prefix = config.train_config.context_length, num_virtual_tokens(config.train_config, config.prefix_config)
    length = asked or DEFAULT_CONTEXT_LENGTH
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is None or length + prefix <= positions:
        return length, []
    if prefix >= positions:
        raise ConfigError(
            f"--num_virtual_tokens: a prefix of {prefix} leaves no room in the {positions} positions of this model; "
            "give fewer"
        )
    positions -= prefix
    taken = f", less the prefix's {prefix}" if prefix else ""
    if asked is not None:
        raise ConfigError(
            f"--context_length: {asked} is more than the {positions} positions of this model "
            f"(max_position_embeddings{taken}); give at most {positions}"
        )
    return positions, [f"context_length: {positions}, all that this model has positions for{taken}"]
