"""LoRA adapters through peft: made fresh, or taken up again from a saved adapter."""

from __future__ import annotations

from collections.abc import Sequence
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
    _check_targets(model, lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, settings)


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Every name must match a module; peft itself is content with one of them."""
    names = [name for name, _ in model.named_modules()]
    unknown = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
        known = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices}
        raise ConfigError(
            f"--lora_config.target_modules: {', '.join(unknown)} match nothing in this model; "
            f"name some of {', '.join(sorted(known))}"
        )


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
