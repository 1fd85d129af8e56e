"""The trial of a run's losses on its own data, before the first step (`policies.loss.label_leaks`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data.sequences.tokenized import Sequences
from data.tokens.labels import IGNORE_INDEX
from policies.building import BuiltModel
from policies.context_parallel.proof import find_other_losses
from policies.loss.label_leaks import LENGTH_ON_CPU, LENGTH_ON_GPU, find_label_leak
from policies.quantization.float8 import computed_in_bf16
from ranks.collectives import gather_to_all
from ranks.environment import Environment
from resolving.inputs import Inputs
from resolving.resolved import Resolved
from tasks.row_shares import share_of
from tasks.task import BatchForm, Task
from utils.errors import ConfigError

NUM_LOOKED_AT = 64  # sequences, of which a short one and a long one are tried
ENOUGH_LABELS, MOST_LABELS = 3, 8  # of a row; logits of more would take memory that a small run does not have


def check_label_leaks(built: BuiltModel, inputs: Inputs, env: Environment) -> None:
    """Refuse a model with which labels would be in sight. Every rank must call this.

    Raises:
        ConfigError: on every rank.
    """
    task, model, resolved = inputs.resolved.task, built.model, inputs.resolved
    rows = rows_to_try(inputs.data.train, task, trial_length(env))
    if not rows:
        return
    packing = resolved.config.train_config.batching_strategy == "packing"
    # No wider than they are, and no rows of padding: compiled code, which would need both, is not called.
    widths = tuple(replace(width, multiple_of=1) for width in resolved.widths)
    form = BatchForm(inputs.vocab_size, widths, packing, built.empty.offsets, 0)
    collate = task.make_collator(inputs.processor, built.empty.model.config, form)
    tolerance = tolerance_of_losses(resolved, env)
    with computed_in_bf16(model):  # in float8 the scale of activations is that of all rows
        found = find_label_leak(model, task.token_losses, collate, rows, env.device, tolerance=tolerance)
    flag, remedy = "--model_name", "give a model of another family"
    if packing and task.READS_IMAGES:  # it may well be padded
        flag, remedy = "--batching_strategy", "give --batching_strategy padding"
    for said in gather_to_all(found):
        if said is not None:
            raise ConfigError(f"{flag}: with {built.empty.architecture} {said}; {remedy}")


def check_shared_losses(built: BuiltModel, inputs: Inputs, env: Environment) -> None:
    """Refuse a model that computes other losses on rows that ranks share. Every rank must call this.

    Raises:
        ConfigError: on every rank.
    """
    task, resolved = inputs.resolved.task, inputs.resolved
    group = resolved.policies.context
    rows = rows_to_try(inputs.data.train, task, trial_length(env))
    if not rows or not group.shares_rows:
        return
    packing = resolved.config.train_config.batching_strategy == "packing"
    widths = tuple(replace(width, multiple_of=group.size) for width in resolved.widths)
    form = BatchForm(inputs.vocab_size, widths, packing, built.empty.offsets, 0)
    whole: Any = task.make_collator(inputs.processor, built.empty.model.config, form)(rows)
    with computed_in_bf16(built.model):  # in float8 the scale of activations is that of a rank's own tokens
        found = find_other_losses(
            built.model,
            task.token_losses,
            whole,
            share_of(whole, group),
            group,
            env.device,
            tolerance=tolerance_of_losses(resolved, env),
        )
    for said in gather_to_all(found):
        if said is not None:
            raise ConfigError(f"--context_parallel_size: with {built.empty.architecture} {said}; leave it out")


def trial_length(env: Environment) -> int:
    """The most tokens of a trial's row."""
    return LENGTH_ON_GPU if env.device.type == "cuda" else LENGTH_ON_CPU


def tolerance_of_losses(resolved: Resolved, env: Environment) -> float:
    """By how much losses may differ that should be equal, relative: kernels round otherwise."""
    is_fp32 = resolved.policies.precision.compute_dtype == torch.float32
    return 1e-3 if is_fp32 and env.device.type == "cpu" else 0.05  # on a GPU fp32 may mean TF32


def rows_to_try(sequences: Sequences, task: Task[Any], num_tokens: int) -> list[list[Any]]:
    """Rows of one sequence each: the shortest and the longest of the first ones, both cut to so many tokens."""
    looked_at = [sequences[index] for index in range(min(NUM_LOOKED_AT, len(sequences)))]
    enough = [s for s in looked_at if np.sum(s.labels != IGNORE_INDEX) >= ENOUGH_LABELS]
    cut = [task.shortened(sequence, num_tokens, MOST_LABELS) for sequence in enough]
    by_length = sorted(cut, key=_length)
    return [[by_length[0]], [by_length[-1]]] if by_length else []


def _length(sequence: Any) -> tuple[int, int]:
    return len(sequence.input_ids), len(sequence.labels)
