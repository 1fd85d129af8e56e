"""What an adapter was trained with and its base's config.json says otherwise: files next to the adapter.

Rotary positions are in one file, the classes of a classifier in another. The values are named and nested as in
config.json, so vLLM takes the text of the first as --hf-overrides.
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
LABELS_FILE = "label_overrides.json"
LABEL_NAMES = ("id2label", "label2id", "problem_type", "pad_token_id")
_NAMES = (
    *("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim"),
    *LABEL_NAMES,
)


def write_config_overrides(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the files; without values there are none."""
    labels = {name: value for name, value in values.items() if name in LABEL_NAMES}
    rope = {name: value for name, value in values.items() if name not in labels}
    for file, of_file in ((ROPE_FILE, rope), (LABELS_FILE, labels)):
        if of_file:
            (folder / file).write_text(json.dumps(of_file, indent=2) + "\n")


def read_config_overrides(folder: Path) -> dict[str, Any]:
    """The values of config.json with which an adapter was trained; none if its base's own.

    Raises:
        ConfigError: if a file cannot be read.
    """
    return _read(folder / ROPE_FILE) | _read(folder / LABELS_FILE)


def _read(file: Path) -> dict[str, Any]:
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
        ConfigError: for a value that is neither of a rope nor of classes.
    """
    # rope_parameters last: transformers compares them with the numbers of positions.
    for name in sorted(values, key=lambda name: name == "rope_parameters"):
        inner = getattr(model_config, name, None)
        if isinstance(inner, PretrainedConfig) and isinstance(values[name], Mapping):
            override(inner, values[name])
        elif name == "id2label":
            model_config.id2label = {int(number): label for number, label in values[name].items()}
        elif name in _NAMES:
            setattr(model_config, name, copy.deepcopy(values[name]))
        else:
            raise ConfigError(
                f"{ROPE_FILE}: {name} is no value of rotary positions of this model; copy the folder again"
            )
