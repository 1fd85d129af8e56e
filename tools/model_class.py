"""The task that a checkpoint's model is of, and the transformers class that it is built with."""

from __future__ import annotations

from typing import Any

import transformers

from checkpointing.exporting.blueprint import describes_no_model, read_model_config
from checkpointing.exporting.model_source import ModelSource
from tasks.finding import TASKS, find_task
from tasks.task import Task


def task_of(source: ModelSource) -> Task:
    """The task of a model, or of an adapter, whose base may be of another: a classifier's is a language model.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    of_adapter = [task for task in TASKS if task.HEAD == "texts" and source.task_type == task.PEFT_TYPE]
    return of_adapter[0] if of_adapter else find_task(read_model_config(source.settings))


def model_class(source: ModelSource) -> Any:
    """The task's class if it builds this model, else the one that config.json names.

    Raises:
        ConfigError: if it names no class of transformers.
    """
    config = read_model_config(source.settings)
    auto_model = task_of(source).AUTO_MODEL
    if type(config) in auto_model._model_mapping:
        return auto_model
    try:
        return getattr(transformers, (config.architectures or ["no architecture"])[0])
    except AttributeError as error:
        raise describes_no_model(source.settings, error) from error
