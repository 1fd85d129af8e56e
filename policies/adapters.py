"""Adapters through peft, made fresh or taken up again from a folder: LoRA and its kinds, LLaMA-Adapter, a prefix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import torch
from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
from peft.tuners.lora import LoraLayer
from peft.tuners.prefix_tuning import PrefixEncoder
from safetensors.torch import load_file
from torch import nn

from configs.peft import DEFAULT_ADAPTER_LAYERS
from configs.run import RunConfig
from policies.adapter_targets import choose_targets, tied_notes
from policies.wrapping import find_layers
from utils.errors import ConfigError, in_one_line

# peft's names of what --peft_method names, and what the names of its parameters hold that no other name holds.
_METHODS = {"LORA": "lora", "ADAPTION_PROMPT": "llama_adapter", "PREFIX_TUNING": "prefix"}
OWN_NAMES = {"LORA": "lora_", "ADAPTION_PROMPT": "adaption_", "PREFIX_TUNING": "prompt_encoder."}
# Ways of starting an adapter that take something out of the base's weights: the base alone is then another model.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Types of models for which peft knows how attention takes gated prompts.
LLAMA_ADAPTER_MODELS = ("gpt2", "llama", "mistral")
# Those whose attention takes a prefix from the cache as peft hands it over; tests hold each to it.
PREFIX_MODELS = ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3")


def apply_adapters(model: nn.Module, config: RunConfig) -> Any:
    """Freeze the model, which may be on the meta device, and put trainable fp32 adapters beside its weights.

    Every rank gets the same adapters, whole and in host memory: drawn from the run's seed, or read from their files.
    Magnitudes of DoRA are still to come where they are not read: see `policies.dora`.

    Raises:
        ConfigError: where the model does not take such an adapter, or the saved one cannot be read.
    """
    train = config.train_config
    if train.from_peft_checkpoint:
        return _load_adapter(model, config)
    make_settings = {"lora": _lora, "llama_adapter": _llama_adapter, "prefix": _prefix}[train.peft_method]
    settings = make_settings(model, config)
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:  # some layers it takes in most families only
        raise ConfigError(f"--use_peft: peft cannot adapt this model ({in_one_line(error)})") from error
    return _draw_adapters(adapted, train.seed)


def adapter_notes(model: Any, config: RunConfig) -> list[str]:
    """Lines to print of what the settings come to on this model."""
    train, asked = config.train_config, config.llama_adapter_config.adapter_layers or DEFAULT_ADAPTER_LAYERS
    if not train.use_peft or train.from_peft_checkpoint:
        return []
    if train.peft_method == "lora":
        return tied_notes(model, config.lora_config.target_modules)
    num_layers = len(find_layers(model.get_decoder()))
    shrinks = train.peft_method == "llama_adapter" and 0 < num_layers < asked
    return [f"adapter_layers: {num_layers}, all that this model has"] if shrinks else []


def own_name(model: Any) -> str:
    """What the names of a PeftModel's own parameters hold, and those of the model under it do not."""
    return OWN_NAMES[model.peft_config[model.active_adapter].peft_type]


def num_virtual_tokens(config: RunConfig) -> int:
    """Positions that a prefix takes from the rows; 0 without one, or where the saved adapter cannot be read."""
    train = config.train_config
    if not train.use_peft or train.peft_method != "prefix":
        return 0
    if not train.from_peft_checkpoint:
        return config.prefix_config.num_virtual_tokens
    try:
        saved = json.loads((Path(train.from_peft_checkpoint).expanduser() / "adapter_config.json").read_text())
        return int(saved.get("num_virtual_tokens", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0  # it is refused when it is loaded


def _lora(model: nn.Module, config: RunConfig) -> peft.PeftConfig:
    lora = config.lora_config
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=choose_targets(model, lora),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type="CAUSAL_LM",
    )


def store_adapters(model: Any, dtype: torch.dtype) -> None:
    """Round the adapters, which were drawn or read in fp32: a seed gives the same ones in either dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _llama_adapter(model: Any, config: RunConfig) -> peft.PeftConfig:
    _check_llama_adapter(model)
    settings, num_layers = config.llama_adapter_config, len(find_layers(model.get_decoder()))
    asked = settings.adapter_layers
    if asked is not None and asked > num_layers:
        raise ConfigError(
            f"--adapter_layers: {asked} layers to adapt, but this model has {num_layers}; give at most {num_layers}"
        )
    return peft.AdaptionPromptConfig(
        adapter_len=settings.adapter_len,
        adapter_layers=asked or min(DEFAULT_ADAPTER_LAYERS, num_layers),
        task_type="CAUSAL_LM",
    )


def _check_llama_adapter(model: Any) -> None:
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


def _prefix(model: Any, config: RunConfig) -> peft.PeftConfig:
    _check_prefix(model)
    return peft.PrefixTuningConfig(num_virtual_tokens=config.prefix_config.num_virtual_tokens, task_type="CAUSAL_LM")


def _check_prefix(model: Any) -> None:
    if model.config.model_type not in PREFIX_MODELS:
        raise ConfigError(
            f"--peft_method: whether {model.config.model_type} models take peft's prefix is not known here, and one "
            f"that ignores it would train nothing; known are {', '.join(PREFIX_MODELS)}; give --peft_method lora"
        )


def _draw_adapters(model: Any, seed: int) -> Any:
    """Draw adapters that peft had put on the meta device, beside the weights that are there, as peft draws them.

    What peft reads off the base's weights, which are not there yet, is NaN: the magnitudes of DoRA.
    """
    own = own_name(model)
    for name, parameter in list(model.named_parameters()):
        if own in name:
            owner, _, attribute = name.rpartition(".")
            undrawn = torch.full_like(parameter, torch.nan, device="cpu", dtype=torch.float32)
            setattr(model.get_submodule(owner), attribute, nn.Parameter(undrawn, parameter.requires_grad))
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, LoraLayer):
                for adapter in module.active_adapters:
                    module.reset_lora_parameters(adapter, init_lora_weights=True)
            elif isinstance(module, AdaptedAttention | AdaptedAttentionGPT):
                nn.init.normal_(module.adaption_prompt)
                nn.init.zeros_(module.adaption_gate)
                _compute_in_the_models_dtype(module)
            elif isinstance(module, PrefixEncoder):
                module.embedding.reset_parameters()
    return model


def _compute_in_the_models_dtype(attention: nn.Module) -> None:
    """Let an fp32 prompt meet a half-precision model: peft itself would multiply the two as they are, and fail."""

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        dtype = hidden_states.dtype
        with torch.autocast(hidden_states.device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return type(self).forward(self, hidden_states=hidden_states, **kwargs)

    attention.forward = MethodType(forward, attention)


def _load_adapter(model: nn.Module, config: RunConfig) -> Any:
    path, seed = config.train_config.from_peft_checkpoint, config.train_config.seed
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"--from_peft_checkpoint: {path} holds no adapter_config.json; give a saved adapter's folder")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"--from_peft_checkpoint: {path} holds no adapter_model.safetensors; "
            "load the adapter with peft and save it again with save_pretrained"
        )
    try:
        settings: Any = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ConfigError(
            f"--from_peft_checkpoint: the settings in {path} cannot be read ({in_one_line(error)})"
        ) from error
    method = config.train_config.peft_method
    _check_saved(model, path, settings, config)
    settings.inference_mode = False
    if method == "lora":
        settings.init_lora_weights = True  # no other way of starting: what it starts from is read
    try:
        adapted = _draw_adapters(peft.get_peft_model(model, settings), seed)
        tensors = load_file(folder / "adapter_model.safetensors")
        report: Any = peft.set_peft_model_state_dict(adapted, tensors)
    except Exception as error:
        raise ConfigError(f"--from_peft_checkpoint: {path} does not fit this model ({in_one_line(error)})") from error
    if settings.is_prompt_learning:  # one tensor, and peft insists on it
        return adapted
    own = own_name(adapted)
    unread = [name for name in report.missing_keys if own in name]
    if unread or report.unexpected_keys:
        name, what = (unread[0], "lacks") if unread else (report.unexpected_keys[0], "holds, unlike this model,")
        raise ConfigError(f"--from_peft_checkpoint: {path} does not fit this model (it {what} {name})")
    return adapted


def _check_saved(model: Any, path: str, settings: Any, config: RunConfig) -> None:
    """Refuse adapters that could not be trained on here as they were made."""
    asked, compiled = config.train_config.peft_method, config.train_config.compile
    method = _METHODS.get(settings.peft_type)
    if method is None:
        raise ConfigError(
            f"--from_peft_checkpoint: {path} is an adapter of the kind {settings.peft_type.value}; "
            "LoRA, LLaMA-Adapter and prefix tuning are trained here"
        )
    if method != asked:
        raise ConfigError(f"--from_peft_checkpoint: {path} is made by another method; give --peft_method {method}")
    if method == "llama_adapter":
        _check_llama_adapter(model)
    if method == "prefix":
        _check_prefix(model)
        if settings.prefix_projection:
            raise ConfigError(
                f"--from_peft_checkpoint: {path} was made with prefix_projection, whose layers peft does not save; "
                "train a new prefix"
            )
    if method == "lora" and (start := began_by_changing_the_base(settings)):
        raise ConfigError(
            f"--from_peft_checkpoint: {path} began as {start}, which changed the base's weights too; convert it to "
            "plain LoRA with peft's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if getattr(settings, "use_dora", False) and compiled:
        raise ConfigError(f"--compile: torch.compile cannot see through the DoRA in {path}; leave it out")
    if method == "lora" and (more := _more_than_lora(settings)):
        raise ConfigError(
            f"--from_peft_checkpoint: {path} was made with {', '.join(more)}, and only LoRA's own factors and DoRA's "
            "magnitudes are trained here; merge it with tools.export --merge and train a new adapter on that"
        )


def _more_than_lora(settings: peft.LoraConfig) -> list[str]:
    """What an adapter trains, or computes, besides LoRA's factors and DoRA's magnitudes."""
    names = ["modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "lora_bias"]
    names += ["use_qalora", "alora_invocation_tokens", "arrow_config", "ensure_weight_tying"]
    # peft marks other ways of computing, where it is new enough.
    names += [field.name for field in dataclasses.fields(settings) if field.metadata.get("is_lora_variant")]
    more = [name for name in dict.fromkeys(names) if name != "use_dora" and getattr(settings, name, None)]
    return more + (["bias"] if settings.bias != "none" else [])


def began_by_changing_the_base(settings: Any) -> str:
    """How an adapter was started, where that took something out of the base's weights; else empty."""
    start = str(getattr(settings, "init_lora_weights", ""))
    return start if start.lower().startswith(_CHANGED_BASE) else ""
