"""The transformers class that a checkpoint's model is built with."""

from __future__ import annotations

from typing import Any

import transformers

from checkpointing.exporting.blueprint import describes_no_model, read_model_config
from tasks.finding import find_task


def model_class(settings: str) -> Any:
    """The task's class if it builds this model, else the one that config.json names.

    Args:
        settings: folder or hub name of config.json.

    Raises:
        ConfigError: if it names no class of transformers.
    """
    config = read_model_config(settings)
    auto_model = find_task(config).AUTO_MODEL
    if type(config) in auto_model._model_mapping:
        return auto_model
    try:
        return getattr(transformers, (config.architectures or ["no architecture"])[0])
    except AttributeError as error:
        raise describes_no_model(settings, error) from error
