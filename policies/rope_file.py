"""The positions that an adapter was trained with, where its base's config.json has others: a file next to it.

Its values are named and nested as in config.json, so vLLM takes the file's text as --hf-overrides.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from utils.errors import ConfigError
from utils.small_files import read_json

ROPE_FILE = "rope_overrides.json"
_NAMES = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim")


def write_rope_file(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the file; without values there is none."""
    if values:
        (folder / ROPE_FILE).write_text(json.dumps(values, indent=2) + "\n")


def read_rope_file(folder: Path) -> dict[str, Any]:
    """The values of config.json with which an adapter was trained; none if its base's own.

    Raises:
        ConfigError: if the file cannot be read.
    """
    file = folder / ROPE_FILE
    if not file.is_file():
        return {}
    try:
        values = read_json(file)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); copy the folder again") from error
    return values


def override(model_config: PretrainedConfig, values: Mapping[str, Any]) -> None:
    """Put such values into a config.

    Raises:
        ConfigError: for a value that is not of a rope.
    """
    # rope_parameters last: transformers compares them with the numbers of positions.
    for name in sorted(values, key=lambda name: name == "rope_parameters"):
        inner = getattr(model_config, name, None)
        if isinstance(inner, PretrainedConfig) and isinstance(values[name], Mapping):
            override(inner, values[name])
        elif name in _NAMES:
            setattr(model_config, name, copy.deepcopy(values[name]))
        else:
            raise ConfigError(
                f"{ROPE_FILE}: {name} is no value of rotary positions of this model; copy the folder again"
            )
