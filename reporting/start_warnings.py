"""Lines at a run's start on settings that a user may want to change before it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from configs.run import RunConfig
from utils.wording import plural

FEW_STEPS = 50
"""A run of fewer optimizer steps learns little, at most learning rates."""

WANTED_STEPS = 100
SHORTEST_CONTEXT = 256  # tokens; shorter rows leave a GPU idle
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
    if start["num_train_rows"] is not None and start["num_train_rows"] < start["world_size"]:
        lines.append(
            f"warning: {plural(start['num_train_rows'], 'training row')} for {start['world_size']} ranks: "
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
    """A line on a run of few optimizer steps, with the flags that make them more. Empty if --max_train_step asks for
    few, and for a stream, whose steps are always asked for.

    Args:
        start, resolved, data: as in `start_warnings`.
    """
    train, num_steps = config.train_config, start["num_steps"]
    if start["num_train_rows"] is None or train.max_train_step or num_steps >= FEW_STEPS:
        return []
    line = f"{plural(num_steps, 'optimizer step')} in all, too few to learn much"
    flags, more = "", num_steps
    for flags_now, num_rows, global_batch in _smaller_steps(config, start, resolved, data):
        steps = math.ceil(num_rows / global_batch) * train.num_epochs
        if steps > more:
            flags, more = flags_now, steps
        if more >= WANTED_STEPS:
            break
    if more < FEW_STEPS:
        num_epochs = math.ceil(WANTED_STEPS * train.num_epochs / more)
        flags, more = f"{flags} --num_epochs {num_epochs}".strip(), more * num_epochs // train.num_epochs
    return [f"{line}; {flags} would make about {more}"]


def _smaller_steps(
    config: RunConfig, start: Mapping[str, Any], resolved: Mapping[str, Any], data: Mapping[str, Any]
) -> Iterator[tuple[str, int, int]]:
    """Flags of runs with less in each optimizer step, the rows of an epoch, and of a step; those with most first.

    Packed rows get shorter, but not shorter than the longest sample.
    """
    train, world_size, figures = config.train_config, start["world_size"], data["train"]
    contexts: list[int | None] = [None]
    length = resolved.get("context_length")
    if train.batching_strategy == "packing" and length is not None:
        shortest = max(SHORTEST_CONTEXT, figures["lengths"]["max"])
        contexts += [2**power for power in range(20, 0, -1) if shortest <= 2**power < length]
    batches = [rows for rows in (2**power for power in range(20, -1, -1)) if rows <= train.batch_size_training]
    # Several micro-batches, or ranks that --global_batch_size counts, come down to one first.
    accumulates = resolved["gradient_accumulation_steps"] > 1
    plans: list[tuple[tuple[int, int], str, int, int]] = []
    for context in contexts:
        num_rows = start["num_train_rows"] if context is None else math.ceil(figures["num_tokens"] / context)
        for rows in batches:
            given = [] if context is None else [f"--context_length {context}"]
            given += [f"--batch_size_training {rows}"] if rows != train.batch_size_training else []
            if train.global_batch_size is not None:
                given += [f"--global_batch_size {rows * world_size}"]
            elif accumulates:
                given += ["--gradient_accumulation_steps 1"]
            width = context or length or 1
            # Of the same number of tokens, several short rows before one long one: attention costs less.
            plans.append(((-width * rows, width), " ".join(given), num_rows, rows * world_size))
    for _, flags, num_rows, global_batch in sorted(plans):
        if flags:
            yield flags, num_rows, global_batch
