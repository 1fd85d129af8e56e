"""Which runs can share rows among ranks (--context_parallel_size), and how many tokens such rows have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from policies.attention.choice import goes_by_offsets, what_hinders_offsets
from policies.attention.flash_attention_4 import AttentionKind
from policies.context_parallel.exchange import repeats_of_keys
from policies.linear_attention.layers import state_layers
from ranks.context_group import ContextGroup
from ranks.environment import Environment
from utils.compat import POSITIONS_AFTER_PADDING
from utils.errors import ConfigError
from utils.layer_configs import layer_configs
from utils.wording import plural

FLAG = "--context_parallel_size"
BY_LONGEST = ("dynamic", "longrope")
"""Types of rotary embeddings whose angles depend on the longest position of a batch, which one rank alone sees."""


def find_context_group(size: int, env: Environment) -> tuple[ContextGroup, list[str]]:
    """The ranks that share rows with this one, and lines to print. `ranks.context_group.join_context_group` joins them.

    Raises:
        ConfigError: if the ranks cannot be grouped so.
    """
    if env.world_size % size:
        raise ConfigError(
            f"{FLAG}: {plural(env.world_size, 'rank')} cannot be grouped by {size}; give a divisor of their number, or "
            "start a multiple of it (torchrun --nproc_per_node)"
        )
    notes = []
    if env.local_world_size % size:
        notes = [
            f"context_parallel_size: {plural(env.local_world_size, 'rank')} of a machine cannot be grouped by {size}, "
            "so rows are shared over the network, in every layer"
        ]
    return ContextGroup(size, env.rank % size), notes


def check_shared_rows(
    group: ContextGroup, config: RunConfig, model_config: PreTrainedConfig, *, is_causal_task: bool
) -> None:
    """Check settings and config.json. `check_attention` will check the model.

    Raises:
        ConfigError: if rows cannot be shared.
    """
    train = config.train_config
    if not group.shares_rows:
        return
    if not is_causal_task:
        raise ConfigError(f"{FLAG}: rows are shared with causal language models of text alone; leave it out")
    if train.use_peft and train.peft_method != "lora":
        raise ConfigError(
            f"{FLAG}: --peft_method {train.peft_method} changes attention, which ranks share; give --peft_method lora"
        )
    if train.use_fast_kernels is False:
        raise ConfigError(f"{FLAG}: attention over ranks needs fast kernels; leave out --use_fast_kernels False")
    if model_config.get_text_config().model_type in POSITIONS_AFTER_PADDING:
        raise ConfigError(f"{FLAG}: {model_config.model_type} models count positions by their padding; leave it out")
    for layer in layer_configs(model_config):
        heads = getattr(layer, "num_attention_heads", 0)
        if heads % group.size:
            raise ConfigError(
                f"{FLAG}: {plural(heads, 'attention head')} of this model cannot be shared evenly by "
                f"{group.size} ranks; give a divisor of {heads}"
            )


def lengths_to_share(
    lengths: tuple[int, ...], group: ContextGroup, *, asked: int | None
) -> tuple[tuple[int, ...], list[str]]:
    """Lengths of which each rank has an equal part, and lines to print.

    Args:
        lengths: in tokens.
        asked: --context_length; a default shrinks.

    Raises:
        ConfigError: if that length has no equal parts.
    """
    shared = tuple(length // group.size * group.size for length in lengths)
    if shared == lengths:
        return lengths, []
    if asked is not None or not all(shared):
        raise ConfigError(
            f"--context_length: {plural(lengths[0], 'token')} cannot be shared evenly by {group.size} ranks ({FLAG}); "
            f"give {max(group.size, shared[0])}"
        )
    return shared, [f"context_length: {shared[0]}, a multiple of the {group.size} ranks that share a row"]


def kinds_over_ranks(kinds: Iterable[AttentionKind], group: ContextGroup) -> set[AttentionKind]:
    """The kinds of attention that each rank computes, with its share of the heads."""
    return {
        kind._replace(
            num_heads=kind.num_heads // group.size,
            num_key_heads=kind.num_key_heads * repeats_of_keys(kind.num_key_heads, group.size) // group.size,
        )
        for kind in kinds
    }


def check_attention(model: PreTrainedModel, group: ContextGroup, row_length: int) -> None:
    """Check a model whose attention was chosen (`policies.attention.choice.choose_attention`).

    Raises:
        ConfigError: if it cannot compute shared rows.
    """
    if group.shares_rows and (obstacle := _obstacle(model, row_length)) is not None:
        raise ConfigError(f"{FLAG}: {obstacle}; leave it out")


def _obstacle(model: PreTrainedModel, row_length: int) -> str | None:
    name = type(model).__name__
    if state_layers(model) or getattr(model, "_is_stateful", False):
        return f"{name} passes a state from token to token, which ranks cannot share"
    if not goes_by_offsets(model.config.get_text_config()._attn_implementation):
        of_device = "flash attention, which it needs, takes bf16 and fp16 alone, on cards since Ampere"
        return what_hinders_offsets(model) or of_device
    for kind, original in _rotary_kinds(model.config.get_text_config()):
        if kind in BY_LONGEST and row_length > original:
            return f"rotary embeddings of type {kind} depend on the longest row beyond {original:,} tokens"
    return None


def _rotary_kinds(config: Any) -> Iterator[tuple[str, int]]:
    """The types of rotary embeddings, and the positions that each was made for; of some families by kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for values in parameters.values() if "rope_type" not in parameters else [parameters]:
        if isinstance(values, dict):
            original = values.get("original_max_position_embeddings") or config.max_position_embeddings
            yield values.get("rope_type", "default"), original
