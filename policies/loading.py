"""The model as its config.json describes it, without weights: those come last, when every rank knows its part of them
(policies/weights.py)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from configs.run import RunConfig
from data.tokenizer import num_rows_needed
from utils.compat import attention_of_capped_scores, caps_scores, must_be_exact
from utils.errors import ConfigError
from utils.hub import check_on_hub, explain


def load_model_config(config: RunConfig) -> PretrainedConfig:
    """The model's config.json, before any weight is read.

    Raises:
        ConfigError: where there is none.
    """
    train = config.train_config
    folder = Path(train.model_name).expanduser()
    if not folder.exists() and train.model_name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"--model_name: there is no folder {train.model_name}")
    if folder.is_dir():
        _check_folder(folder, needs_weights=not train.random_weights)
    else:
        check_on_hub("--model_name", train.model_name, "model")
    try:
        model_config = AutoConfig.from_pretrained(train.model_name, trust_remote_code=train.trust_remote_code)
    except Exception as error:
        raise ConfigError(f"--model_name: {train.model_name!r} cannot be read ({explain(error)})") from error
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(
            f"--model_name: the weights of {train.model_name} are stored quantized, and such weights cannot be "
            "trained; give the full-precision model"
        )
    return model_config


def _check_folder(folder: Path, *, needs_weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model_name: {folder} has no config.json; give the folder that save_pretrained wrote")
    if not needs_weights or any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ConfigError(
            f"--model_name: {folder} holds pickled weights only, which can run code when read; "
            f"if you trust them, convert them: "
            f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    raise ConfigError(
        f"--model_name: {folder} has no *.safetensors weights; --random_weights trains from config.json alone"
    )


def build_model(config: RunConfig, model_config: PretrainedConfig, auto_model: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters, in `dtype`, on the meta device: they have shapes and no values yet.

    Buffers are real. Many of them are computed when the model is built and are in no checkpoint, so they could not be
    read later.

    Raises:
        ConfigError: where the config does not describe a model that can be built.
    """
    train = config.train_config
    attention = attention_settings(config, model_config)
    try:
        with init_empty_weights(include_buffers=False):
            model = auto_model.from_config(
                model_config, dtype=dtype, trust_remote_code=train.trust_remote_code, **attention
            )
    except Exception as error:
        raise explain_failed_load(config, error) from error
    model.tie_weights()  # accelerate makes a new parameter of every one, and so unties them
    _keep_exact_buffers(model)
    model.name_or_path = model.config._name_or_path = train.model_name
    if model.can_generate():
        with suppress(OSError):  # without generation_config.json, the one made from config.json stays
            model.generation_config = GenerationConfig.from_pretrained(train.model_name)
    return model


def _keep_exact_buffers(model: Any) -> None:
    """In fp32 what the family must not have rounded, as `from_pretrained` keeps it: DeepSeek-V3's routers choose
    experts by biases that differ by less than bf16 resolves."""
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and must_be_exact(model, f"{module_name}.{name}"):
                setattr(module, name, buffer.float())


def attention_settings(config: RunConfig, model_config: PretrainedConfig) -> dict[str, Any]:
    """What `from_config` and `from_pretrained` are told about attention.

    Raises:
        ConfigError: where SDPA is asked for, and cannot compute this model's attention.
    """
    if not config.train_config.use_fast_kernels:
        return attention_of_capped_scores(model_config)
    if caps_scores(model_config):
        raise ConfigError(
            f"--use_fast_kernels: SDPA cannot soft-cap attention scores, as {config.train_config.model_name} does "
            "(attn_logit_softcapping); leave the flag out"
        )
    return {"attn_implementation": "sdpa"}


def explain_failed_load(config: RunConfig, error: Exception) -> ConfigError:
    """The refusal that a library's error in building or reading the model comes to."""
    train = config.train_config
    flag = "--use_fast_kernels" if "attention" in str(error) and train.use_fast_kernels else "--model_name"
    return ConfigError(f"{flag}: {train.model_name} could not be loaded ({explain(error)})")


def grow_embeddings(model: Any, tokenizer: Any, *, use_peft: bool) -> list[str]:
    """Give the model rows for tokens that it does not have; never shrink it, never for padding alone.

    Returns:
        Lines to print.

    Raises:
        ConfigError: under LoRA, whose adapter could not hold the new rows.
    """
    rows, needed = model.get_input_embeddings().num_embeddings, num_rows_needed(tokenizer)
    if needed <= rows:
        return []
    if use_peft:
        raise ConfigError(
            f"--tokenizer_name: the tokenizer has {needed} tokens, the model {rows}, and an adapter cannot "
            "hold new embeddings; resize and save the base model first, or train without --use_peft"
        )
    model.resize_token_embeddings(needed, mean_resizing=False)  # shapes alone; policies.weights gives the values
    return [f"embeddings grown from {rows} to {needed} rows: the tokenizer has more tokens than the model"]
