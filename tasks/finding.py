"""Which tasks there are, and which one a model is for."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from configs.datasets import CustomDataset
from configs.run import RunConfig
from tasks.causal_lm import CausalLM
from tasks.image_text import ImageText
from tasks.preference import Preference
from tasks.reward_model import RewardModel
from tasks.seq2seq_lm import Seq2SeqLM
from tasks.task import Task
from tasks.text_classification import TextClassification
from utils.compat import list_text_model
from utils.errors import ConfigError

TASKS: tuple[Task, ...] = (
    ImageText(),
    Seq2SeqLM(),
    TextClassification(),
    CausalLM(),
    Preference(),
    RewardModel(),
)
"""The first that fits a model's config is its task: transformers' mapping of causal models names BART and some
models of images, too."""


def find_task(model_config: PreTrainedConfig, asked: str | None = None) -> Task:
    """The task of the model with this config.

    Args:
        asked: --task, if it was given.

    Raises:
        ConfigError: if there is no such task, or the model cannot be of it.
    """
    list_text_model(model_config)
    if asked is None:
        # If none fits, CausalLM's check_config refuses the model and says why.
        return next((task for task in TASKS if task.is_made_for(model_config)), CausalLM())
    task = next((task for task in TASKS if asked == task.NAME), None)
    if task is None:
        names = ", ".join(task.NAME for task in TASKS)
        raise ConfigError(f"--task: {asked!r} is not one of {names}; give one of these, or leave it out")
    if not task.fits(model_config):
        lacks = f"transformers has no {task.AUTO_MODEL.__name__} of {model_config.model_type} models"
        if isinstance(task, Preference):  # of --loss_type: --task need not be given
            raise ConfigError(
                f"--loss_type: pairs of answers are for causal language models, and {lacks}; give another model, or "
                "leave it out"
            )
        fitting = [task.NAME for task in TASKS if task.is_made_for(model_config)]
        remedy = f"give --task {' or '.join(fitting)}, or leave it out" if fitting else "give another model"
        raise ConfigError(f"--task: {lacks}; {remedy}")
    return task


def settings_of_task(config: RunConfig, task: Task, model_config: PreTrainedConfig) -> RunConfig:
    """The settings with the defaults that depend on the task; a note is added for each that changed.

    Raises:
        ConfigError: for a setting that was given and that the task does not take.
    """
    others = {name: other for other in TASKS for name in other.OWN_SETTINGS if name not in task.OWN_SETTINGS}
    for name, other in others.items():
        if config.was_given(f"train_config.{name}"):
            instead = [f"--{own}" for own in task.LENGTHS] if name in other.LENGTHS else []
            remedy = f"give {' and '.join(instead)} instead" if instead else "leave it out"
            raise ConfigError(f"--{name}: this is a model for --task {task.NAME}, which does not take it; {remedy}")
    task.check_settings(config)
    train = config.train_config
    with_images = [name for name, dataset in config.dataset_configs.items() if dataset.HAS_IMAGES]
    if with_images and not task.READS_IMAGES:
        raise ConfigError(
            f"--dataset: {with_images[0]} is for models of image and text, and this is one for --task {task.NAME}; "
            "give another dataset, or another model"
        )
    _check_labels(config, task)
    if train.batching_strategy == "padding" or task.packs(model_config):
        return config
    if config.was_given("train_config.batching_strategy"):
        raise ConfigError(
            f"--batching_strategy: {train.batching_strategy} is for causal language models, and this one is for --task "
            f"{task.NAME}; give padding, or leave it out"
        )
    note = f"--batching_strategy is padding with --task {task.NAME}"
    return replace(config, train_config=replace(train, batching_strategy="padding"), notes=(*config.notes, note))


def _check_labels(config: RunConfig, task: Task) -> None:
    """Refuse a dataset of texts with labels for a task that learns none, and one without them for a task that does."""
    for name, dataset in config.dataset_configs.items():
        lacks_labels = task.LEARNS == "labels" and not dataset.HAS_LABELS
        lacks_pairs = task.NAME == RewardModel.NAME and not dataset.HAS_PAIRS
        if (lacks_labels or lacks_pairs) and not isinstance(dataset, CustomDataset):
            lacking, given = ("labels of whole texts", "classification") if lacks_labels else ("pairs", "preference")
            raise ConfigError(
                f"--dataset: {name} has no {lacking}, which --task {task.NAME} learns; give {given}_dataset, or a "
                "function of your own"
            )
        if dataset.HAS_LABELS and task.LEARNS != "labels":
            raise ConfigError(
                f"--dataset: {name} has labels of whole texts, and --task {task.NAME} learns tokens; give --task "
                "text_classification"
            )
