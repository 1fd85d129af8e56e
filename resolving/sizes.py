"""Sizes that no machine has: each is refused by the least that it would need, before anything is started for it.

These are lower bounds. A run that passes may still turn out too large; a run that is refused could not have worked.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from configs.peft import ALL_LINEAR, DEFAULT_ADAPTER_LAYERS
from configs.run import RunConfig
from configs.training import TrainConfig
from data.pipeline import RunData
from data.tokens.labels import IGNORE_INDEX
from ranks.environment import Environment
from utils.errors import ConfigError
from utils.host_memory import host_bytes
from utils.layer_configs import layer_configs
from utils.units import readable
from utils.wording import plural

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PROCESSES_PER_CORE = 4
_FEW_PROCESSES = 16  # are always allowed


def check_workers(train: TrainConfig, env: Environment) -> None:
    """Refuse more data loading processes than the cores of this machine could ever serve.

    Raises:
        ConfigError: with the most that it takes.
    """
    num_cores = len(os.sched_getaffinity(0))
    most = max(_FEW_PROCESSES, _PROCESSES_PER_CORE * num_cores) // env.local_world_size
    if train.num_workers_dataloader > max(1, most):
        raise ConfigError(
            f"--num_workers_dataloader: {train.num_workers_dataloader} processes for each of {env.local_world_size} "
            f"ranks on this machine's {num_cores} cores; give at most {max(1, most)}"
        )


def check_model_sizes(config: RunConfig, model_config: PreTrainedConfig, context_length: int, env: Environment) -> None:
    """Refuse an adapter or a row that needs more than the memory there is.

    Raises:
        ConfigError: with the flag, the memory needed and the memory there.
    """
    hidden = _hidden_size(model_config)
    _refuse_above(
        env.device_facts.memory_bytes,
        context_length * hidden * 4 // config.fsdp_config.context_parallel_size,
        "--context_length",
        f"a row of {context_length:,} tokens",
    )
    if not config.train_config.use_peft or config.train_config.from_peft_checkpoint:
        return
    if config.train_config.peft_method == "lora":
        _check_rank(config.lora_config.r, model_config)
    if env.planned_device is not None:  # how much host memory there is, is known of this machine alone
        return
    # Every rank holds its adapter whole, in fp32; on a CPU its gradient and the optimizer's states, too.
    num_copies = env.local_world_size * (4 if env.device.type == "cpu" else 1)
    flag, num_weights = _adapter_weights(config, model_config)
    _refuse_above(host_bytes(), 4 * num_weights * num_copies, flag, f"an adapter of {num_weights:,} weights")


def check_batch_sizes(
    train: TrainConfig,
    data: RunData,
    model_config: PreTrainedConfig,
    vocab_size: int,
    *,
    memory_bytes: int,
    num_sharing: int = 1,
) -> None:
    """Refuse micro-batches that need more memory than the device has, given the rows of this data.

    Args:
        num_sharing: ranks that share each row.
        vocab_size: rows of the embeddings.
        memory_bytes: of the device.

    Raises:
        ConfigError: with the flag, the memory needed and the memory there.
    """
    splits = (
        ("--batch_size_training", train.batch_size_training, data.train, data.train_rows),
        ("--val_batch_size", train.val_batch_size, data.evaluation, data.eval_rows),
    )
    for flag, batch_size, sequences, rows in splits:
        if sequences is None or not len(sequences):
            continue
        # A stream has rows without end, as long as its first sequences under padding.
        mean_length = float(rows.lengths.mean()) if rows is not None else float(sequences.lengths.mean())
        num_rows = min(batch_size, len(rows)) if rows is not None else batch_size
        num_tokens = int(num_rows * mean_length) // num_sharing
        what = f"a micro-batch of {plural(num_rows, 'row')} ({plural(num_tokens, 'token')})"
        _refuse_above(memory_bytes, num_tokens * 4 * _hidden_size(model_config), flag, what)
        share = int(np.count_nonzero(sequences.labels != IGNORE_INDEX)) / len(sequences.input_ids)
        num_labels = min(train.loss_chunk_size or num_tokens, int(num_tokens * share))
        what = f"the logits of {plural(num_labels, 'token')} at a time"
        _refuse_above(memory_bytes, num_labels * 4 * vocab_size, "--loss_chunk_size", what)


def _check_rank(r: int, model_config: PreTrainedConfig) -> None:
    """Refuse a rank beyond that of any weight: it would add memory and nothing else."""
    inner = [getattr(one, "intermediate_size", None) for one in layer_configs(model_config)]
    sizes = [_hidden_size(model_config), *inner, 4 * _hidden_size(model_config)]
    most = max(size for size in sizes if isinstance(size, int))
    if 0 < most < r:
        raise ConfigError(
            f"--lora_config.r: {r} is more than the rank of any weight in this model's layers; give at most {most} "
            "(8 to 256 are usual)"
        )


def _adapter_weights(config: RunConfig, model_config: PreTrainedConfig) -> tuple[str, int]:
    """The flag that decides how large the adapter is, and at least how many weights it has."""
    text, hidden = model_config.get_text_config(), _hidden_size(model_config)
    num_layers = getattr(text, "num_hidden_layers", 1)
    if config.train_config.peft_method == "prefix":
        heads = getattr(text, "num_attention_heads", None) or 1
        share = min(getattr(one, "num_key_value_heads", None) or heads for one in layer_configs(model_config)) / heads
        num_tokens = config.prefix_config.num_virtual_tokens
        return "--num_virtual_tokens", int(2 * num_tokens * hidden * share * num_layers)
    if config.train_config.peft_method == "llama_adapter":
        adapted = config.llama_adapter_config.adapter_layers or DEFAULT_ADAPTER_LAYERS
        return "--adapter_len", config.llama_adapter_config.adapter_len * hidden * min(adapted, num_layers)
    targets = [name for name in config.lora_config.target_modules if name.endswith("_proj") or name == ALL_LINEAR]
    return "--lora_config.r", config.lora_config.r * hidden * num_layers * len(targets)


def _hidden_size(model_config: PreTrainedConfig) -> int:
    size = getattr(model_config.get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) else 0


def _refuse_above(there: int, needed: int, flag: str, what: str) -> None:
    if needed > there:
        raise ConfigError(
            f"{flag}: {what} needs at least {readable(needed)}, and there are {readable(there)}; give less"
        )
