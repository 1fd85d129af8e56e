"""The model of a run: built without weights, adapted, sharded and filled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from configs.run import RunConfig
from data.packing import Offsets
from data.tokenizer_loading import num_rows_needed
from policies.activation_checkpointing import checkpointing_mode
from policies.adapters import adapter_notes
from policies.apply_policies import apply_policies
from policies.attention import choose_attention, rows_that_need_offsets
from policies.loading import build_model, grow_embeddings
from policies.mixed_precision import Precision
from policies.quantized_linear import Quantization
from policies.sharding import Layout
from policies.weights import find_weights
from utils.environment import Environment, print_rank_zero


@dataclass(frozen=True)
class BuiltModel:
    """A model that can be called, and what the settings came to for it."""

    model: nn.Module
    architecture: str  # its class; sharding and adapters rename it
    attention: str
    offsets: Offsets  # the rows whose documents' offsets its attention needs
    checkpointing: str
    load_seconds: float


def build_for_training(
    config: RunConfig,
    model_config: Any,
    tokenizer: Any,
    *,
    auto_model: Any,
    task_type: str,
    check_model: Callable[[Any, str], None],
    find_backbone: Callable[[Any], nn.Module],
    precision: Precision,
    quantization: Quantization | None,
    layout: Layout,
    row_length: int,
    env: Environment,
) -> BuiltModel:
    """The model, adapted, sharded and filled; what was adapted is printed. Every rank must call this.

    Args:
        auto_model, task_type, check_model, find_backbone: those of the task (`tasks.task.Task`).
        row_length: the most tokens that a row of the run holds.

    Raises:
        ConfigError: on every rank, if the model cannot be built, read or trained so.
    """
    started, dtype = time.perf_counter(), precision.storage_dtype
    model = build_model(config.train_config, model_config, auto_model, dtype)
    check_model(model, config.train_config.model_name)
    notes = choose_attention(model, config, precision, env.device)
    attention, offsets = model.config.get_text_config()._attn_implementation, rows_that_need_offsets(model, row_length)
    notes += grow_embeddings(model, tokenizer, use_peft=config.train_config.use_peft)
    notes += adapter_notes(model, config.train_config, config.lora_config, config.llama_adapter_config)
    weights = find_weights(config.train_config, model, auto_model, dtype, env, num_rows=num_rows_needed(tokenizer))
    checkpointing, checkpointing_notes = checkpointing_mode(
        model, config.train_config, config.fsdp_config, quantized=quantization is not None
    )
    print_rank_zero(env, *notes, weights.note, *checkpointing_notes)
    architecture = type(model).__name__
    model = apply_policies(
        model,
        find_backbone(model),
        config,
        precision=precision,
        quantization=quantization,
        layout=layout,
        checkpointing=checkpointing,
        task_type=task_type,
        weights=weights,
        env=env,
    )
    return BuiltModel(model, architecture, attention, offsets, checkpointing, time.perf_counter() - started)
