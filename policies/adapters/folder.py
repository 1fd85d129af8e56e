"""The folder that --from_peft_checkpoint names, and what is known of its adapter without peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.peft import PrefixConfig
from configs.training import TrainConfig
from policies.config_overrides import LABEL_NAMES, read_config_overrides
from utils.errors import ConfigError
from utils.small_files import read_json


def find_saved_adapter(path: str) -> Path:
    """The folder that --from_peft_checkpoint names.

    Raises:
        ConfigError: if no adapter lies there.
    """
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        of_run = folder / "adapter"
        remedy = of_run if (of_run / "adapter_config.json").is_file() else "a saved adapter's folder"
        raise ConfigError(f"--from_peft_checkpoint: {path} holds no adapter_config.json; give {remedy}")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"--from_peft_checkpoint: {path} holds no adapter_model.safetensors; "
            "load the adapter with peft and save it again with save_pretrained"
        )
    return folder


def saved_rope(path: str) -> dict[str, Any]:
    """The values of config.json that the adapter in --from_peft_checkpoint was trained with; none if its base's own."""
    values = read_config_overrides(Path(path).expanduser())
    return {name: value for name, value in values.items() if name not in LABEL_NAMES}


def saved_labels(path: str) -> dict[str, Any]:
    """The classes in the order of an adapter's head, as in config.json; none if it has no head of its own."""
    values = read_config_overrides(Path(path).expanduser())
    return {name: value for name, value in values.items() if name in LABEL_NAMES}


def saved_parts(train: TrainConfig) -> tuple[str, ...]:
    """The modules that the saved adapter holds whole, such as a head; none without one, or if it cannot be read."""
    if not train.use_peft or not train.from_peft_checkpoint:
        return ()
    try:
        saved = read_json(Path(train.from_peft_checkpoint).expanduser() / "adapter_config.json")
        return tuple(map(str, saved.get("modules_to_save") or ()))
    except (OSError, ValueError, TypeError, AttributeError):
        return ()  # it is refused when it is loaded


def num_virtual_tokens(train: TrainConfig, prefix: PrefixConfig) -> int:
    """Positions that a prefix takes from the rows; 0 without a prefix, or if the saved adapter cannot be read."""
    if not train.use_peft or train.peft_method != "prefix":
        return 0
    if not train.from_peft_checkpoint:
        return prefix.num_virtual_tokens
    try:
        saved = read_json(Path(train.from_peft_checkpoint).expanduser() / "adapter_config.json")
        return int(saved.get("num_virtual_tokens", 0))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return 0  # it is refused when it is loaded
