"""How the global batch is cut over the ranks, and how many optimizer steps a run has."""

from __future__ import annotations

from dataclasses import replace

from configs.run import RunConfig
from configs.tracking import TrackingConfig
from configs.training import TrainConfig
from data.batches.layout import BatchLayout
from reporting.profiling import num_steps_needed
from utils.errors import ConfigError
from utils.wording import plural

MAX_GLOBAL_BATCH = 10**15  # rows: their number must fit into 64 bits, and so must what is computed with it


def batch_layout(
    train: TrainConfig, data_parallel_size: int, resumed_size: int | None
) -> tuple[BatchLayout, list[str]]:
    """How the global batch is cut over these ranks, and lines to print.

    Args:
        data_parallel_size: ranks with rows of their own.
        resumed_size: as in `resolve`.

    Raises:
        ConfigError: if the global batch does not divide.
    """
    if train.global_batch_size is None and resumed_size is None:
        layout = BatchLayout(train.batch_size_training, train.gradient_accumulation_steps, data_parallel_size)
        if layout.global_batch_size > MAX_GLOBAL_BATCH:
            raise ConfigError(
                f"--batch_size_training: times --gradient_accumulation_steps and ranks that is "
                f"{plural(layout.global_batch_size, 'row')} per optimizer step; give at most {MAX_GLOBAL_BATCH:,}"
            )
        return layout, []
    size = train.global_batch_size or resumed_size
    if resumed_size is not None and size != resumed_size:
        raise ConfigError(
            f"--global_batch_size: the checkpoint was trained with {plural(resumed_size, 'row')} per optimizer step, "
            f"and its place in the data is counted in these; give {resumed_size}, or leave it out"
        )
    assert size is not None
    rows_per_rank, rest = divmod(size, data_parallel_size)
    if resumed_size is not None and train.min_steps and rows_per_rank and not rest:
        # The run chose its batches by its data; the flags are the most.
        rows = max(n for n in range(1, min(train.batch_size_training, rows_per_rank) + 1) if rows_per_rank % n == 0)
        return BatchLayout(rows, rows_per_rank // rows, data_parallel_size), []
    accumulation, rest = divmod(size, train.batch_size_training * data_parallel_size)
    if rest or not accumulation:
        flag = "--global_batch_size: " if resumed_size is None else "--resume: the checkpoint's global batch of "
        raise ConfigError(
            f"{flag}{plural(size, 'row')} is no multiple of {train.batch_size_training} (batch_size_training) x "
            f"{plural(data_parallel_size, 'rank')} with rows of their own; give another --batch_size_training"
        )
    notes = []
    if train.global_batch_size is None and accumulation != train.gradient_accumulation_steps:
        notes = [
            f"gradient_accumulation_steps: {accumulation} instead of {train.gradient_accumulation_steps}: a resumed "
            f"run keeps its global batch of {plural(size, 'row')}"
        ]
    return BatchLayout(train.batch_size_training, accumulation, data_parallel_size), notes


def with_batches(config: RunConfig, batches: BatchLayout) -> RunConfig:
    """The settings with the rows of these batches, which may be fewer than those asked for."""
    rows, accumulation = batches.rows_per_micro_batch, batches.gradient_accumulation_steps
    train = replace(config.train_config, batch_size_training=rows, gradient_accumulation_steps=accumulation)
    return replace(config, train_config=train)


def resolve_num_steps(train: TrainConfig, tracking: TrackingConfig, steps_per_epoch: int) -> int:
    """The steps of `steps_of_run`, checked.

    Raises:
        ConfigError: if the run ends before the step that it was asked to record.
    """
    num_steps = steps_of_run(train, steps_per_epoch)
    needed = num_steps_needed(tracking)
    if num_steps < needed:
        remedy = "raise --max_train_step" if train.max_train_step == num_steps else "raise --num_epochs"
        if tracking.use_profiler:
            raise ConfigError(
                f"--use_profiler: the run has {num_steps} optimizer steps, and needs more than {needed - 1} for the "
                f"profiler to wait, warm up and record; {remedy}, or leave it out"
            )
        raise ConfigError(
            f"--flop_counter_start: the run has {num_steps} optimizer steps, so step {needed} would never be counted; "
            f"{remedy}, or give --flop_counter_start {num_steps}"
        )
    return num_steps


def steps_of_run(train: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    num_steps = steps_per_epoch * train.num_epochs
    return min(num_steps, train.max_train_step) if train.max_train_step else num_steps
