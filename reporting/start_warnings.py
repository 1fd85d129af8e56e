"""Lines at a run's start on settings that a user may want to change before it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from configs.run import RunConfig
from configs.training import TrainConfig
from utils.wording import plural

FEW_STEPS = 50
"""A run of fewer optimizer steps learns little, at most learning rates."""

WANTED_STEPS = 100
EPOCHS_OF_GAMMA = 6


def start_warnings(
    config: RunConfig, start: Mapping[str, Any], resolved: Mapping[str, Any], data: Mapping[str, Any]
) -> list[str]:
    """The lines to print.

    Args:
        start: the `start` event.
        resolved: the settings as decided for this machine and model.
        data: of `reporting.data_preview.preview_data`.
    """
    train, lines = config.train_config, []
    num_sharing = config.fsdp_config.context_parallel_size
    if start["num_train_rows"] is not None and start["num_train_rows"] * num_sharing < start["world_size"]:
        shared = f", {num_sharing} for each" if num_sharing > 1 else ""
        lines.append(
            f"warning: {plural(start['num_train_rows'], 'training row')} for {start['world_size']} ranks{shared}: "
            "some ranks have nothing to do"
        )
    warmup_steps = train.warmup_of(start["num_steps"])
    if warmup_steps >= start["num_steps"]:
        flag = "--warmup_ratio" if train.warmup_ratio else "--warmup_steps"
        lines.append(
            f"warning: the learning rate rises for {plural(warmup_steps, 'step')} ({flag}), and the run ends after "
            f"{start['num_steps']}: it never reaches --lr"
        )
    lines += [f"warning: {line}" for line in few_steps_lines(config, start, resolved, data)]
    is_default = not any(config.was_given(f"train_config.{name}") for name in ("scheduler", "gamma"))
    if is_default and train.num_epochs > EPOCHS_OF_GAMMA and train.gamma < 1 and start["num_train_rows"] is not None:
        lines.append(
            f"scheduler: step, the default, multiplies lr by {train.gamma:g} (--gamma) after each epoch; epoch "
            f"{train.num_epochs} has {train.gamma ** (train.num_epochs - 1):.2g} of the first one's; "
            "--scheduler cosine or constant learns longer"
        )
    if not train.save_model:
        lines.append("save_model is False: the trained weights will not be kept")
    return lines


def few_steps_lines(
    config: RunConfig, start: Mapping[str, Any], resolved: Mapping[str, Any], data: Mapping[str, Any]
) -> list[str]:
    """A line on a run of few optimizer steps, with the flags that make them more: --min_steps, and more epochs if a
    sample per rank in a step is still too much. Empty if --max_train_step asks for few, and for a stream, whose steps
    are always asked for.

    Args:
        start, resolved, data: as in `start_warnings`.
    """
    train, num_steps = config.train_config, start["num_steps"]
    if start["num_train_rows"] is None or train.max_train_step or num_steps >= FEW_STEPS:
        return []
    data_parallel_size = start["world_size"] // config.fsdp_config.context_parallel_size
    most = max(num_steps, math.ceil(data["train"]["num_samples"] / data_parallel_size) * train.num_epochs)
    flags = []
    if most > num_steps and train.min_steps < WANTED_STEPS:
        flags = [f"--min_steps {WANTED_STEPS}", *_without(train)]
    else:
        most = num_steps
    made = min(most, math.ceil(WANTED_STEPS / train.num_epochs) * train.num_epochs)  # epochs have whole steps
    if made < FEW_STEPS:
        num_epochs = math.ceil(WANTED_STEPS * train.num_epochs / made)
        flags, made = [*flags, f"--num_epochs {num_epochs}"], made * num_epochs // train.num_epochs
    said = f"{plural(num_steps, 'optimizer step')} in all, too few to learn much"
    return [f"{said}; {' '.join(flags)} would make about {made}"]


def _without(train: TrainConfig) -> list[str]:
    """The given flags with which --min_steps has no effect, in words (configs/adaptation.py)."""
    names = [name for name in ("global_batch_size", "limit_train_batches") if getattr(train, name)]
    return [f"without --{' and --'.join(names)}"] if names else []
