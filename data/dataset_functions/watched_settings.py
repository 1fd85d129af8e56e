"""Whether a user's dataset function reads the settings that were given for it; one that it never reads is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from configs.datasets import CustomDataset, DataSource
from utils.errors import ConfigError

_FOR_THE_FUNCTION = (
    *("data_path", "hub_config", "validation_fraction", "skip_bad_rows", "learn_empty_answers"),
    "split_special_tokens",
)
_WHOLE = "__dict__"  # vars(), a copy and a pickle read it


class WatchedSettings(CustomDataset):
    """The settings of a user's function, which note what is read of them."""

    def __getattribute__(self, name: str) -> Any:
        if name in _FOR_THE_FUNCTION or name == _WHOLE:
            object.__getattribute__(self, _WHOLE).setdefault("settings_read", set()).add(name)
        return object.__getattribute__(self, name)


def watched(dataset_config: DataSource) -> DataSource:
    """The settings, to be given to a dataset function; a built-in one's as they are."""
    if not isinstance(dataset_config, CustomDataset) or dataset_config.file is None:
        return dataset_config
    return WatchedSettings(**asdict(dataset_config))


def refuse_unread(dataset_config: DataSource) -> None:
    """Refuse settings that the function has not read, once its rows were.

    Raises:
        ConfigError: for the first one that was given.
    """
    if not isinstance(dataset_config, WatchedSettings):
        return
    settings = object.__getattribute__(dataset_config, _WHOLE)
    read = settings.get("settings_read", set())
    for name in _FOR_THE_FUNCTION:
        if settings[name] != getattr(CustomDataset, name) and not read & {name, _WHOLE}:
            raise ConfigError(
                f"--custom_dataset.{name}: {settings['file']} never reads it; read dataset_config.{name} there, or "
                "leave the flag out"
            )
