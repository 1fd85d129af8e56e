"""Attention: sequences of a packed row must not see each other, padding must not be seen, and both should cost little.

Position ids that restart tell transformers where sequences begin. Eager and SDPA attention then get a dense mask, made
once per forward pass. Variable-length flash attention, if the device has it, takes the sequences' offsets instead, made
once per batch: nothing is computed between sequences, and nothing of the size [seq, seq] is held. A CPU calls SDPA for
each sequence instead. FlashAttention 4, where it is installed, serves all of these rows. Attention with sinks goes by
offsets wherever there are kernels (policies/attention/sinks.py).

Padded rows need neither: padding is on the right, where causal attention never looks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from configs.run import RunConfig
from configs.train_settings.data import DEFAULT_CONTEXT_LENGTH
from configs.training import TrainConfig
from data.batches.packing import Offsets
from policies.attention.functions import attention_by_flash_4, attention_by_offsets
from policies.attention.packed_images import keep_images_apart
from policies.attention.packing_leaks import LEAKS
from policies.linear_attention.choice import stateful_class, why_padded
from policies.linear_attention.layers import state_layers
from policies.mixed_precision import Precision
from utils.compat import (
    LEAKS_BY_MASKS,
    LEAKS_WHEN_PACKED,
    POSITIONS_AFTER_PADDING,
    WINDOW_ONLY_IN_MASK,
    caps_scores,
    has_sinks,
)
from utils.device import DeviceFacts
from utils.errors import ConfigError
from utils.layer_configs import head_dim_of, layer_configs
from utils.model_parts import has_vision

BY_OFFSETS, BY_FLASH_4 = "causal_by_offsets", "causal_by_fa4"
"""The names by which transformers knows `attention_by_offsets` and `attention_by_flash_4`.

transformers has no mask functions of these names, so it makes no mask. For its own names it looks at position ids or at
the mask of padding to see whether one is needed, and the host waits for the device in every forward pass. A name that
holds "flash" it would take for one of its own.
"""

WITHOUT_MASKS = (BY_OFFSETS, BY_FLASH_4)


def goes_by_offsets(attention: str) -> bool:
    """Whether the attention of this name takes no masks. Over ranks (policies/context_parallel/) its name is longer."""
    return attention.startswith(WITHOUT_MASKS)


ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""The names of its probability in transformers' configs: most families', GPT-2's and BERT's."""

WITHOUT_ATTENTION = {"linear_attention", "conv", "hybrid", "moe", "mlp"}
"""transformers' names of layers that have a state, beside full attention or none, and of those that have neither."""


def keep_documents_apart(
    config: RunConfig, model_config: PreTrainedConfig, precision: Precision, device: DeviceFacts
) -> RunConfig:
    """The settings, with padding instead of packing if packing is known to leak with this model, and a note of it.

    A model with a state is packed if the kernels are there that keep its documents apart, or if that was asked for.
    `policies.attention.packing_leaks` will see whether it can be.

    Raises:
        ConfigError: if packing was asked for, and leaks whatever the kernels, or gives documents other positions.
    """
    config = _keep_chunks(keep_images_apart(config, model_config), model_config)
    train, model_type = config.train_config, model_config.get_text_config().model_type
    is_shifted = model_type in POSITIONS_AFTER_PADDING
    leaks = model_type in LEAKS_WHEN_PACKED or (
        model_type in LEAKS_BY_MASKS and not _have_kernels(train, model_config, precision, device)
    )
    if train.batching_strategy != "packing":
        return config
    reason = f"in a packed row of {model_type} models, documents would see each other" if leaks else None
    if is_shifted:
        reason = f"positions of {model_type} models begin after the padding id, and those of a packed document at 0"
    if config.was_given("train_config.batching_strategy"):
        if leaks:
            raise ConfigError(LEAKS)
        if is_shifted:
            raise ConfigError(f"--batching_strategy: {reason}; give --batching_strategy padding")
        return config
    if reason is None and (model_class := stateful_class(model_config)) is not None:
        reason = why_padded(model_class, model_type)
    if reason is None:
        return config
    note = f"--batching_strategy is padding: {reason}"
    return replace(config, train_config=replace(train, batching_strategy="padding"), notes=(*config.notes, note))


def _keep_chunks(config: RunConfig, model_config: PreTrainedConfig) -> RunConfig:
    """The settings, with padding instead of packed rows whose documents would be cut elsewhere than alone.

    Llama 4's chunks of attention, and the steps of its temperature, are counted from the start of the row.

    Raises:
        ConfigError: if packing was asked for.
    """
    train, text = config.train_config, model_config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("attention_chunk_size", "floor_scale")]
    chunk = min(filter(None, sizes), default=None)
    length = train.context_length or DEFAULT_CONTEXT_LENGTH
    if train.batching_strategy != "packing" or chunk is None or length <= chunk:
        return config
    reason = f"{text.model_type} models count chunks of {chunk:,} tokens from the start of a row, not of its documents"
    if config.was_given("train_config.batching_strategy"):
        raise ConfigError(
            f"--batching_strategy: {reason}; give --batching_strategy padding, or --context_length {chunk}"
        )
    note = f"--batching_strategy is padding: {reason}"
    return replace(config, train_config=replace(train, batching_strategy="padding"), notes=(*config.notes, note))


def choose_attention(
    model: PreTrainedModel,
    train: TrainConfig,
    precision: Precision,
    device: DeviceFacts,
    row_length: int,
    *,
    flash_4: bool = False,
    shares_rows: bool = False,
) -> list[str]:
    """Spare the model masks: of packed rows by offsets, if model and device can, and of padded rows altogether.

    Args:
        model: of causal language; its config names the attention that transformers chose.
        row_length: the most tokens of a row.
        flash_4: whether FlashAttention 4 works on the devices, with the heads of this model.
        shares_rows: ranks share rows, so padded ones, too, go by offsets or not at all (policies/context_parallel/).

    Returns:
        Lines to print.
    """
    if train.use_fast_kernels is False:
        return []
    if train.batching_strategy == "padding" and not shares_rows:
        prefixed = train.use_peft and train.peft_method == "prefix"  # in a cache, so keys are more than queries
        if prefixed or what_needs_masks(model) is not None:
            return []
        is_served = True  # by SDPA's causal kernel, which has neither sinks nor windows
        if has_sinks(model.config) or _window_cuts(model, row_length):
            # On a CPU compiled layers would break where offsets are read, but for sinks that is inside an operator.
            reads_in_graph = device.type == "cpu" and bool(train.compile) and not has_sinks(model.config)
            is_served = _have_kernels(train, model.config, precision, device) and not reads_in_graph
        return _use_offsets(model, flash_4=flash_4) if is_served else []
    if device.type == "cpu":
        # Compiled layers would break where the offsets are read, but for sinks that is inside an operator.
        if (has_sinks(model.config) or shares_rows or not train.compile) and what_hinders_offsets(model) is None:
            _use_offsets(model)
        return []
    # torch's flash kernels need the same generation of cards as bf16, Ampere or later.
    if not device.has_bf16:
        return []
    if precision.compute_dtype == torch.float32:
        return ["attention: flash kernels have no fp32; packed rows get a dense mask, which is slower"]
    obstacle = what_hinders_offsets(model)
    if obstacle:
        return [f"attention: {obstacle}; packed rows get a dense mask, which is slower"]
    notes = _use_offsets(model, flash_4=flash_4)
    if train.batching_strategy == "padding":
        return notes
    return ["attention: packed documents are told apart by their offsets (variable-length flash attention)", *notes]


def _have_kernels(
    train: TrainConfig, model_config: PreTrainedConfig, precision: Precision, device: DeviceFacts
) -> bool:
    """Whether attention with sinks or in windows has kernels that take offsets."""
    # torch's flash kernels need the same generation of cards as bf16, Ampere or later, and half precision.
    on_device = device.type == "cpu" or (device.has_bf16 and precision.compute_dtype != torch.float32)
    return on_device and train.use_fast_kernels is not False and _what_kernels_lack(model_config, "") is None


def _use_offsets(model: PreTrainedModel, *, flash_4: bool = False) -> list[str]:
    """Take this run's attention by offsets. Returns lines to print."""
    if flash_4 and what_hinders_offsets(model) is None:
        AttentionInterface.register(BY_FLASH_4, attention_by_flash_4)
        set_attention(model, BY_FLASH_4)
        return ["attention: by flash-attn-4"]
    AttentionInterface.register(BY_OFFSETS, attention_by_offsets)
    set_attention(model, BY_OFFSETS)
    return []


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Let the language model have the attention of this name. A vision encoder, which is not causal, keeps its own."""
    language_model = model.get_decoder() if has_vision(model) else model
    language_model.set_attn_implementation(name)


def rows_that_need_offsets(model: PreTrainedModel, row_length: int, *, packed: bool = True) -> Offsets:
    """Which packed rows need `cu_seqlens` for this model's attention, or for its layers with a state.

    Args:
        row_length: the most tokens of a row.
        packed: whether rows are packed; padded ones take a mask if their attention does, and need no offsets.
    """
    if not goes_by_offsets(model.config.get_text_config()._attn_implementation):
        return "shared" if packed and state_layers(model) else "none"
    # Without offsets SDPA takes a row for one sequence. Its causal kernel is faster, but has no sliding windows.
    # Attention with sinks never goes there.
    return "all" if packed and _window_cuts(model, row_length) and not has_sinks(model.config) else "shared"


def what_hinders_shared_keys(model: PreTrainedModel) -> str | None:
    """Why a sequence of a packed row cannot see the start of another one with this model, whose attention is chosen;
    as a clause, and None if it can (`policies.attention.shared_keys`)."""
    if state_layers(model):
        return f"{type(model).__name__} passes a state from token to token"
    if not goes_by_offsets(model.config.get_text_config()._attn_implementation):
        return f"the attention of {type(model).__name__} takes masks here"
    return None


def attention_with_masks(model: PreTrainedModel) -> str:
    """The name of the attention that a model generates with: by masks, which our attention by offsets has none of."""
    return "eager" if has_sinks(model.config) else "sdpa"


def _window_cuts(model: PreTrainedModel, row_length: int) -> bool:
    """Whether a layer's sliding window, if it has one, is shorter than a row."""
    windows = (getattr(layer, "sliding_window", None) or 0 for layer in layer_configs(model.config))
    return any(0 < window < row_length for window in windows)


def what_hinders_offsets(model: PreTrainedModel) -> str | None:
    """Why this model's attention cannot be `attention_by_offsets`; None if it can."""
    if (obstacle := what_needs_masks(model)) is not None:
        return obstacle
    return _what_kernels_lack(model.config, type(model).__name__)


def _what_kernels_lack(model_config: PreTrainedConfig, name: str) -> str | None:
    """What flash kernels lack for the attention of a model of this name, as a clause; None if nothing."""
    config = model_config.get_text_config()
    if getattr(config, "sliding_window", None) and config.model_type in WINDOW_ONLY_IN_MASK:
        return f"{name} has its sliding window in the mask alone"
    if any(getattr(config, key, 0.0) for key in ATTENTION_DROPOUT):
        return f"{name} drops out attention, which the flash kernel does not"
    if hasattr(config, "v_head_dim") or any(size > 256 or size % 8 for size in map(head_dim_of, layer_configs(config))):
        return f"the flash kernel does not take the heads of {name}"
    return None


def what_needs_masks(model: PreTrainedModel) -> str | None:
    """Why transformers has to make masks for this model's attention; None if it is causal, with windows at most."""
    config = model.config.get_text_config()
    name = type(model).__name__
    if caps_scores(config):
        return f"{name} soft-caps its attention scores, which the flash kernel does not"
    has_states = bool(state_layers(model))
    if has_vision(model) and hasattr(model, "create_masks_for_generate"):  # Gemma 3, PaliGemma
        return f"{name} draws masks of its own, in which the tokens of an image see each other"
    # Models that support flash attention pass windows as an argument, not in a mask. Those with a state, which have no
    # windows, are not said to support other backends, since they would not reach all of their layers.
    follows = getattr(model, "_supports_attention_backend", False) or has_states
    is_supported = follows and getattr(model, "_supports_flash_attn", False)
    if not is_supported or config._attn_implementation != attention_with_masks(model):
        return f"{name} has no flash attention in transformers"
    kinds = {"full_attention", "sliding_attention"} | (WITHOUT_ATTENTION if has_states else set())
    if not set(getattr(config, "layer_types", None) or ()) <= kinds:
        return f"{name} has layers of other kinds than full and sliding attention"
    if not getattr(config, "is_causal", True):
        return f"{name} attends in both directions"
    return None
