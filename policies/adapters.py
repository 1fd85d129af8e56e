"""LoRA adapters through peft: made fresh, or taken up again from a saved adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
from torch import nn

from configs.errors import ConfigError
from configs.run import RunConfig


def apply_adapters(model: nn.Module, config: RunConfig) -> Any:
    """Freeze the model and put trainable fp32 adapters beside its weights.

    Raises:
        ConfigError: where no module matches, or the saved adapter cannot be read.
    """
    train, lora = config.train_config, config.lora_config
    if train.from_peft_checkpoint:
        return _load_adapter(model, train.from_peft_checkpoint)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        if "not found in the base model" not in str(error) and "No modules were targeted" not in str(error):
            raise
        names = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        )
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(lora.target_modules)} match nothing in this model; "
            f"its linear layers are {', '.join(names)}"
        ) from error


def _load_adapter(model: nn.Module, path: str) -> Any:
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"--from_peft_checkpoint: {path} holds no adapter_config.json; give a saved adapter's folder")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"--from_peft_checkpoint: {path} holds no adapter_model.safetensors; "
            "load the adapter with peft and save it again with save_pretrained"
        )
    try:
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"--from_peft_checkpoint: {path} does not fit this model ({reason})") from error
