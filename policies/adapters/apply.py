"""Adapters through peft, new or trained on from a folder: LoRA and its variants, LLaMA-Adapter, prefix tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MethodType
from typing import Any

import peft
import torch
from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.prefix_tuning import PrefixEncoder
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from configs.adaptation import CANNOT_TRACE_DORA
from configs.peft import DEFAULT_ADAPTER_LAYERS, LlamaAdapterConfig, LoraConfig
from configs.run import RunConfig
from configs.training import TrainConfig
from policies.adapters.folder import find_saved_adapter
from policies.adapters.initial_factors import check_layers, draw_orthogonal
from policies.adapters.kinds import (
    METHODS,
    check_llama_adapter,
    check_prefix,
    llama_adapter_settings,
    lora_settings,
    prefix_settings,
)
from policies.adapters.lora_layers import adapts_linear, drop_inputs
from policies.adapters.saved import attach_adapter, check_base_is_unchanged, read_adapter_config, set_adapter
from policies.adapters.saved_parts import PEFTS_HEADS, keep_saved_parts
from policies.adapters.target_notes import target_notes
from policies.experts.finding import find_experts
from policies.wrapping import find_layers
from utils.autocast import autocast
from utils.device import DeviceFacts
from utils.errors import ConfigError, in_one_line


def apply_adapters(
    model: PreTrainedModel,
    config: RunConfig,
    task_type: str | None,
    new_tokens: Sequence[int] = (),
    saved_parts: Sequence[str] = (),
    device: str = "cpu",
) -> peft.PeftModel:
    """Freeze the model, which may be on the meta device, and add trainable fp32 adapters to its layers.

    Every rank gets the same adapters, whole and in host memory: drawn from the run's seed, or read from their files.
    DoRA's magnitudes come later if they are not read (see `policies.adapters.dora`).

    Args:
        task_type: peft's name of the task; None if it has none.
        new_tokens: the ids of tokens whose embeddings are trained, too; their values come last
            (`policies.adapters.new_tokens`).
        saved_parts: modules that are trained whole and saved with the adapter; their values come last, too
            (`policies.adapters.saved_parts`).
        device: where the adapters are; on "meta" they have shapes and no values.

    Raises:
        ConfigError: if the model does not take such an adapter, or the saved one cannot be read.
    """
    train = config.train_config
    if train.from_peft_checkpoint:
        return _load_adapter(model, train, saved_parts, device)
    settings = _new_settings(model, config, task_type, new_tokens, saved_parts)
    try:
        adapted, _ = attach_adapter(model, settings, device=device)
    except ValueError as error:  # a kind of layer that it takes in most families only
        raise ConfigError(f"--use_peft: peft cannot adapt this model ({in_one_line(error)})") from error
    check_layers(adapted, config.lora_config)
    _draw_adapter(adapted, train.seed, orthogonal=config.lora_config.init_lora_weights == "orthogonal")
    if isinstance(settings, peft.LoraConfig) and settings.target_parameters and config.lora_config.lora_dropout:
        drop_inputs(adapted, config.lora_config.lora_dropout)
    return _compute_prompts_in_the_models_dtype(adapted)


def _new_settings(
    model: PreTrainedModel,
    config: RunConfig,
    task_type: str | None,
    new_tokens: Sequence[int],
    saved_parts: Sequence[str],
) -> peft.PeftConfig:
    method = config.train_config.peft_method
    if method == "lora":
        return lora_settings(model, config.lora_config, task_type, new_tokens, saved_parts)
    if method == "prefix":
        return prefix_settings(model, config.prefix_config, task_type)
    return llama_adapter_settings(model, config.llama_adapter_config, task_type)


def adapter_notes(
    model: PreTrainedModel,
    train: TrainConfig,
    lora: LoraConfig,
    llama_adapter: LlamaAdapterConfig,
    device: DeviceFacts,
) -> list[str]:
    """Lines to print about the adapter that these settings give this model."""
    if not train.use_peft or train.from_peft_checkpoint:
        return []
    if train.peft_method == "lora":
        return target_notes(model, lora, device)
    num_layers = len(find_layers(model.get_decoder()))
    asked = llama_adapter.adapter_layers or DEFAULT_ADAPTER_LAYERS
    shrinks = train.peft_method == "llama_adapter" and 0 < num_layers < asked
    return [f"adapter_layers: {num_layers}, all that this model has"] if shrinks else []


def store_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the adapters. They were drawn or read in fp32, so a seed gives the same ones in either dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _draw_adapter(adapted: nn.Module, seed: int, *, orthogonal: bool) -> None:
    """Draw a new adapter as peft draws it.

    What peft computes from the base's weights comes later, since these are not there yet: the magnitudes of DoRA stay
    NaN, and the factors of PiSSA and OLoRA are replaced.
    """
    # Of the CPU's generator alone, which goes on as if nothing had been drawn: adapters are drawn in host memory.
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                for adapter in module.active_adapters:
                    if orthogonal:
                        draw_orthogonal(module, adapter)
                    else:
                        module.reset_lora_parameters(adapter, init_lora_weights=True)
            elif isinstance(module, AdaptedAttention | AdaptedAttentionGPT):
                nn.init.normal_(module.adaption_prompt)
                nn.init.zeros_(module.adaption_gate)
            elif isinstance(module, PrefixEncoder):
                module.embedding.reset_parameters()


def _compute_prompts_in_the_models_dtype(adapted: peft.PeftModel) -> peft.PeftModel:
    """Let fp32 prompts meet a half-precision model: peft itself would multiply the two as they are, and fail."""

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        with autocast(hidden_states.device, hidden_states.dtype):
            return type(self).forward(self, hidden_states=hidden_states, **kwargs)

    attentions: list[Any] = [m for m in adapted.modules() if isinstance(m, AdaptedAttention | AdaptedAttentionGPT)]
    for attention in attentions:
        attention.forward = MethodType(forward, attention)
    return adapted


def _load_adapter(
    model: PreTrainedModel, train: TrainConfig, saved_parts: Sequence[str], device: str
) -> peft.PeftModel:
    path, folder = train.from_peft_checkpoint, find_saved_adapter(train.from_peft_checkpoint)
    settings = read_adapter_config(folder, "--from_peft_checkpoint")
    _check_saved(model, settings, train, saved_parts)
    settings.inference_mode = False  # saved adapters say True, which freezes them
    if isinstance(settings, peft.LoraConfig):
        settings.init_lora_weights = True  # no other start: its values are read
    try:
        adapted, own_names = attach_adapter(model, settings, device=device)
        tensors = load_file(folder / "adapter_model.safetensors")
        set_adapter(adapted, own_names, {name: tensor.to(device) for name, tensor in tensors.items()})
        _check_parameters(model)
        keep_saved_parts(adapted)
    except Exception as error:
        raise ConfigError(f"--from_peft_checkpoint: {path} does not fit this model ({in_one_line(error)})") from error
    return _compute_prompts_in_the_models_dtype(adapted)


def _check_saved(model: PreTrainedModel, settings: Any, train: TrainConfig, saved_parts: Sequence[str]) -> None:
    """Refuse adapters that could not be trained on here as they were made."""
    path, method = train.from_peft_checkpoint, METHODS.get(settings.peft_type)
    if method is None:
        raise ConfigError(
            f"--from_peft_checkpoint: {path} is an adapter of the kind {settings.peft_type.value}; "
            "LoRA, LLaMA-Adapter and prefix tuning are trained here"
        )
    if method != train.peft_method:
        raise ConfigError(f"--from_peft_checkpoint: {path} is made by another method; give --peft_method {method}")
    if method == "llama_adapter":
        check_llama_adapter(model)
    if method == "prefix":
        check_prefix(model)
        if settings.prefix_projection:
            raise ConfigError(
                f"--from_peft_checkpoint: {path} was made with prefix_projection, whose layers peft does not save; "
                "train a new prefix"
            )
    check_base_is_unchanged(settings, f"--from_peft_checkpoint: {path}")
    if getattr(settings, "use_dora", False) and train.compile:
        raise ConfigError(f"--compile: {CANNOT_TRACE_DORA} ({path}); leave it out")
    if method == "lora" and (more := _more_than_lora(settings, saved_parts)):
        raise ConfigError(
            f"--from_peft_checkpoint: {path} was made with {', '.join(more)}, and only LoRA's own factors and DoRA's "
            "magnitudes are trained here; merge it with tools.export --merge and train a new adapter on that"
        )


def _more_than_lora(settings: peft.LoraConfig, saved_parts: Sequence[str]) -> list[str]:
    """The settings of an adapter that go beyond LoRA's factors, DoRA's magnitudes and the head of a task."""
    has_other_parts = bool({*(settings.modules_to_save or ())} - {*saved_parts, *PEFTS_HEADS})
    names = ["modules_to_save"] if has_other_parts or not saved_parts else []
    names += ["trainable_token_indices", "layer_replication", "lora_bias"]
    names += ["use_qalora", "alora_invocation_tokens", "arrow_config", "ensure_weight_tying"]
    # Newer versions of peft mark other ways of computing.
    names += [field.name for field in dataclasses.fields(settings) if field.metadata.get("is_lora_variant")]
    # DoRA is such a variant, too, and the one that is supported.
    more = [name for name in dict.fromkeys(names) if name != "use_dora" and getattr(settings, name, None)]
    return more + (["bias"] if settings.bias != "none" else [])


def _check_parameters(model: PreTrainedModel) -> None:
    """Refuse adapters of parameters that are neither experts nor weights of linear layers, which peft computes whole.

    Raises:
        ValueError: with the first.
    """
    experts = {id(module) for module in find_experts(model).values()}
    for name, module in model.named_modules():
        if (
            isinstance(module, ParamWrapper)
            and not adapts_linear(module)
            and id(module.get_base_layer()) not in experts
        ):
            raise ValueError(f"{name}.{module.parameter_name} is neither an expert nor a linear layer's weight")
