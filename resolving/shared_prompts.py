"""Whether both answers of a pair share their prompt in the rows of a run, which packing has to know."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from transformers import PreTrainedConfig

from configs.run import RunConfig
from policies.attention.choice import choose_attention, what_hinders_shared_keys
from policies.loading import build_model
from policies.mixed_precision import Precision
from tasks.preference import Preference
from tasks.task import Task
from utils.device import DeviceFacts
from utils.errors import ConfigError


def shares_prompts(task: Task) -> bool:
    """Whether pairs of this run share their prompt."""
    return isinstance(task, Preference) and task.shares_prompts


def with_shared_prompts(
    task: Task,
    config: RunConfig,
    model_config: PreTrainedConfig,
    precision: Precision,
    device: DeviceFacts,
    row_length: int,
    *,
    were_shared: bool | None = None,
) -> tuple[Task, list[str]]:
    """The task, with prompts that pairs share if rows are packed and the model's attention can; and lines to print.

    Args:
        were_shared: whether they are under the checkpoint that the run goes on from, whose rows and reference are of
            that form; None: there is none.

    Raises:
        ConfigError: if that was asked for, or is the checkpoint's form, and is not possible.
    """
    if not isinstance(task, Preference):
        return task, []
    is_asked, is_given = config.preference_config.share_prompts, config.was_given("preference_config.share_prompts")
    keeps_form = not config.train_config.resume_anyway
    if is_given and were_shared not in (None, is_asked) and keeps_form:
        form = "share their prompt" if were_shared else "have a prompt for each answer"
        raise ConfigError(f"--share_prompts: the checkpoint's pairs {form}; leave it out")
    if not (is_asked if were_shared is None or is_given else were_shared):
        return task, []
    reason = _what_hinders(task, config, model_config, precision, device, row_length)
    if reason is None:
        return replace(task, shares_prompts=True), []
    if were_shared and keeps_form:
        raise ConfigError(
            f"--resume: the checkpoint's pairs share their prompt, and {reason}; give what was given there, or "
            "--overwrite to start afresh"
        )
    if is_given:
        raise ConfigError(f"--share_prompts: {reason}; leave it out")
    is_packed = config.train_config.batching_strategy == "packing"
    return task, [f"pairs: each answer has its prompt: {reason}"] if is_packed else []


def _what_hinders(
    task: Preference,
    config: RunConfig,
    model_config: PreTrainedConfig,
    precision: Precision,
    device: DeviceFacts,
    row_length: int,
) -> str | None:
    """Why prompts cannot be shared, as a clause; None if they can."""
    train = config.train_config
    if train.batching_strategy != "packing":
        return "under --batching_strategy padding each answer has a row to itself"
    # Without weights: that takes a fraction of a second. The choice of attention is kept in the config, so the run's
    # own, which makes it later, is not given.
    model = build_model(train, deepcopy(model_config), task.AUTO_MODEL, precision.storage_dtype)
    choose_attention(model, train, precision, device, row_length)
    return what_hinders_shared_keys(model)
