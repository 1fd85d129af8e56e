"""Weights into memory: from a Hugging Face folder or hub name, or random ones from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from configs.errors import ConfigError
from configs.run import RunConfig
from utils.hub import check_on_hub, explain
from utils.tokenization import num_rows_needed


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
        return AutoConfig.from_pretrained(train.model_name, trust_remote_code=train.trust_remote_code)
    except Exception as error:
        raise ConfigError(f"--model_name: {train.model_name!r} cannot be read ({explain(error)})") from error


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


def load_model(
    config: RunConfig, model_config: PretrainedConfig, auto_model: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """The model with its weights in `dtype`, in host memory; random weights are made on the device.

    Every rank gets the same weights: it reads the same files, or draws them from the same seed.

    Raises:
        ConfigError: where the weights cannot be read or do not cover the model.
    """
    train = config.train_config
    attention = {"attn_implementation": "sdpa"} if train.use_fast_kernels else {}
    try:
        if train.random_weights:
            with torch.device(device):
                return auto_model.from_config(
                    model_config, dtype=dtype, trust_remote_code=train.trust_remote_code, **attention
                )
        model, report = auto_model.from_pretrained(
            train.model_name,
            config=model_config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=train.trust_remote_code,
            output_loading_info=True,
            **attention,
        )
    except Exception as error:
        flag = "--use_fast_kernels" if "attention" in str(error) and train.use_fast_kernels else "--model_name"
        raise ConfigError(f"{flag}: {train.model_name} could not be loaded ({explain(error)})") from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ConfigError(
            f"--model_name: the weights of {train.model_name} lack {len(missing)} tensors, {missing[0]} first; they "
            "would be trained from random values. Is this a complete checkpoint of this model?"
        )
    return model


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
    model.resize_token_embeddings(needed)
    return [f"embeddings grown from {rows} to {needed} rows: the tokenizer has more tokens than the model"]
