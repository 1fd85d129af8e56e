"""A folder in Hugging Face format as other programs see it: its config, its adapter, its tensors' names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from checkpointing.exporting.blueprint import read_model_config
from policies.config_overrides import read_config_overrides
from policies.weights.stored import SafetensorsTensors
from run_folder.entries import CHECKPOINTS, RUN_ENTRIES
from run_folder.run_yaml import NAME as RUN_YAML
from utils.errors import ConfigError
from utils.small_files import read_json

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class ServedFolder:
    """A model's or an adapter's folder."""

    path: Path

    @property
    def is_adapter(self) -> bool:
        return (self.path / ADAPTER_CONFIG).is_file()

    @cached_property
    def adapter(self) -> dict[str, Any]:
        """adapter_config.json.

        Raises:
            ConfigError: if it cannot be read.
        """
        return _object(self.path / ADAPTER_CONFIG)

    @property
    def base(self) -> str:
        """Folder or hub name of the adapter's base model."""
        return str(self.adapter.get("base_model_name_or_path") or "")

    @cached_property
    def rope(self) -> dict[str, Any]:
        """The values of config.json that an adapter was trained with and its base does not have.

        Raises:
            ConfigError: if the file that says them cannot be read.
        """
        return read_config_overrides(self.path) if self.is_adapter else {}

    @cached_property
    def architecture(self) -> str:
        """The class of transformers that config.json names; of an adapter, its base's.

        Raises:
            ConfigError: if it cannot be read.
        """
        config = read_model_config(self.base if self.is_adapter else str(self.path))
        return str((config.architectures or ["no class"])[0])

    @cached_property
    def adapter_tensors(self) -> list[str]:
        """The names of an adapter's tensors."""
        return list(SafetensorsTensors([self.path / "adapter_model.safetensors"]).index)


def ready_folder(path: Path) -> ServedFolder:
    """The folder in Hugging Face format that a path is, or that a run has saved its weights in.

    Raises:
        ConfigError: if there is none; --to makes one.
    """
    if (path / RUN_YAML).is_file() or (path / CHECKPOINTS).is_dir():
        saved = [path / name for name in RUN_ENTRIES if name in ("adapter", "model") and (path / name).is_dir()]
        path = saved[0] if saved else path
    is_adapter = all((path / name).is_file() for name in (ADAPTER_CONFIG, "adapter_model.safetensors"))
    if not is_adapter and not ((path / "config.json").is_file() and any(path.glob("model*.safetensors"))):
        raise ConfigError(f"--to: {path} is no folder in Hugging Face format; give --to DIR to make one of it")
    return ServedFolder(path)


def _object(file: Path) -> dict[str, Any]:
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); copy the folder again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is no JSON object; copy the folder again")
    return values
