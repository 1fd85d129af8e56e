"""--min_steps: batches that follow the data, so that little data is not trained on in a handful of steps."""

from __future__ import annotations

from dataclasses import replace

from data.batches.layout import BatchLayout
from data.batches.rows import Rows, make_rows
from data.pipeline import RunData, eval_rows_of
from resolving.batches_and_steps import steps_of_run, with_batches
from resolving.resolved import Resolved
from utils.wording import plural

SHORTEST_ROW = 8  # tokens


def with_enough_steps(resolved: Resolved, data: RunData) -> tuple[Resolved, RunData]:
    """The settings and the rows with which a run makes at least --min_steps optimizer steps.

    A step takes fewer rows first. Packed rows are filled less if one row per rank is still too much. The flags are the
    most: data that makes more steps is left as it is. Every rank decides alike, from the data that all have in common.
    """
    train, batches, rows = resolved.config.train_config, resolved.batches, data.train_rows
    if not train.min_steps or rows is None:
        return resolved, data
    needed = -(-min(train.min_steps, train.max_train_step or train.min_steps) // train.num_epochs)  # in an epoch
    if batches.num_steps(len(rows)) >= needed:
        return resolved, data
    fewer, packed_length = _fewer_rows(batches, len(rows), needed), None
    if rows.packed and fewer.num_steps(len(rows)) < needed:
        packed_length = max(SHORTEST_ROW, int(rows.lengths.sum()) // (batches.data_parallel_size * needed))
        rows = make_rows(
            data.train, batching_strategy="packing", context_length=packed_length, indices=data.epoch_indices
        )
        if data.evaluation is not None:
            data = replace(data, eval_rows=eval_rows_of(data.evaluation, train, packed_length))
        data = replace(data, train_rows=rows)
    chosen = replace(
        resolved,
        config=with_batches(resolved.config, fewer),
        batches=fewer,
        began_with=resolved.began_with._replace(packed_length=packed_length),
    )
    note = _note(resolved, chosen, rows, steps_of_run(train, fewer.num_steps(len(rows))))
    return replace(chosen, notes=(*chosen.notes, note)), data


def _fewer_rows(batches: BatchLayout, num_rows: int, num_steps: int) -> BatchLayout:
    """The largest global batch that makes so many steps of these rows, or one row per rank; whole micro-batches."""
    # ceil(num_rows / size) >= num_steps, if size < num_rows / (num_steps - 1)
    most = max(1, (num_rows - 1) // max(1, num_steps - 1) // batches.data_parallel_size)
    rows = min(batches.rows_per_micro_batch, most)
    accumulation = min(batches.gradient_accumulation_steps, most // rows)
    return replace(batches, rows_per_micro_batch=rows, gradient_accumulation_steps=accumulation)


def _note(asked: Resolved, chosen: Resolved, rows: Rows, num_steps: int) -> str:
    size, packed_length = chosen.batches.global_batch_size, chosen.began_with.packed_length
    train, filled = asked.config.train_config, ""
    if packed_length is not None:
        filled = f", filled with {packed_length:,} tokens instead of {asked.context_length:,},"
        if len(rows) == len(rows.indices):
            filled = ", each of one sample," if size > 1 else ", of one sample,"
    line = (
        f"min_steps: {plural(size, 'row')} in a step instead of {asked.batches.global_batch_size:,}{filled} "
        f"{'make' if size > 1 else 'makes'} {plural(num_steps, 'step')}"
    )
    if num_steps < min(train.min_steps, train.max_train_step or train.min_steps):
        line += "; the data has no more, but --num_epochs makes more"
    return line
