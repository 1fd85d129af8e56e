"""The kinds of adapter: what --peft_method and peft call them, which models take them, and peft's settings for each."""

from __future__ import annotations

from collections.abc import Sequence

import peft
from transformers import PreTrainedModel

from configs.peft import DEFAULT_ADAPTER_LAYERS, LlamaAdapterConfig, LoraConfig, PrefixConfig
from policies.adapters.new_tokens import token_settings
from policies.adapters.saved_parts import PEFTS_HEADS
from policies.adapters.targets import choose_targets
from policies.wrapping import find_layers
from utils.errors import ConfigError
from utils.wording import plural

METHODS = {"LORA": "lora", "ADAPTION_PROMPT": "llama_adapter", "PREFIX_TUNING": "prefix"}
"""--peft_method by peft's name of the kind."""

LLAMA_ADAPTER_MODELS = ("gpt2", "llama", "mistral")
"""Model types for which peft knows how attention takes gated prompts."""

PREFIX_MODELS = ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3")
"""Model types whose attention reads a prefix from the cache as peft passes it; tests check each."""


def lora_settings(
    model: PreTrainedModel,
    lora: LoraConfig,
    task_type: str | None,
    new_tokens: Sequence[int] = (),
    saved_parts: Sequence[str] = (),
) -> peft.PeftConfig:
    targets, times = choose_targets(model, lora), 2 if lora.begins_in_base else 1
    return peft.LoraConfig(
        trainable_token_indices=token_settings(model, lora, new_tokens),
        r=times * lora.r,
        lora_alpha=times * lora.lora_alpha,
        # peft has no dropout for parameters, and loads none for layers next to them. `drop_inputs` gives them theirs.
        lora_dropout=0.0 if targets.parameters else lora.lora_dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type=task_type,
        # peft adds those of its own names itself.
        modules_to_save=[name for name in saved_parts if name not in PEFTS_HEADS] or None,
    )


def llama_adapter_settings(
    model: PreTrainedModel, llama_adapter: LlamaAdapterConfig, task_type: str | None
) -> peft.PeftConfig:
    check_llama_adapter(model)
    asked, num_layers = llama_adapter.adapter_layers, len(find_layers(model.get_decoder()))
    if asked is not None and asked > num_layers:
        raise ConfigError(
            f"--adapter_layers: {plural(asked, 'layer')} to adapt, but this model has {num_layers}; give at most "
            f"{num_layers}"
        )
    return peft.AdaptionPromptConfig(
        adapter_len=llama_adapter.adapter_len,
        adapter_layers=asked or min(DEFAULT_ADAPTER_LAYERS, num_layers),
        task_type=task_type,
    )


def check_llama_adapter(model: PreTrainedModel) -> None:
    """Refuse models that peft's LLaMA-Adapter does not fit."""
    text = model.config.get_text_config()
    if model.config.model_type not in LLAMA_ADAPTER_MODELS:
        raise ConfigError(
            f"--peft_method: peft has LLaMA-Adapter for {', '.join(LLAMA_ADAPTER_MODELS)} models, not for "
            f"{model.config.model_type}; give --peft_method lora"
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim * text.num_attention_heads != text.hidden_size:
        raise ConfigError(
            f"--peft_method: peft's LLaMA-Adapter takes heads that share hidden_size among them, and this model's "
            f"{text.num_attention_heads} heads of {head_dim} are not {text.hidden_size}; give --peft_method lora"
        )


def prefix_settings(model: PreTrainedModel, prefix: PrefixConfig, task_type: str | None) -> peft.PeftConfig:
    check_prefix(model)
    return peft.PrefixTuningConfig(num_virtual_tokens=prefix.num_virtual_tokens, task_type=task_type)


def check_prefix(model: PreTrainedModel) -> None:
    """Refuse models that no test has shown to read a prefix."""
    if model.config.model_type not in PREFIX_MODELS:
        raise ConfigError(
            f"--peft_method: whether {model.config.model_type} models take peft's prefix is not known here, and one "
            f"that ignores it would train nothing; known are {', '.join(PREFIX_MODELS)}; give --peft_method lora"
        )
