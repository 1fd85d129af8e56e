"""How the rows of a run's batches are laid out. If layers are compiled, one graph is to serve all batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from data.batches.packing import offsets_of_one_graph
from data.batches.padding import one_width
from data.batches.rows import make_rows
from data.pipeline import RunData
from policies.building import MetaModel
from resolving.inputs import Inputs
from resolving.resolved import Resolved
from tasks.row_shares import SharedRows
from tasks.task import BatchForm


def collator_of_run(inputs: Inputs, empty: MetaModel) -> Callable[[int], Callable[[list[Any]], Any]]:
    """A function that returns what makes micro-batches of at most so many rows.

    Args:
        empty: the run's model.
    """
    resolved, train = inputs.resolved, inputs.resolved.config.train_config
    context = resolved.policies.context
    packing, offsets, widths = train.batching_strategy == "packing", empty.offsets, resolved.widths
    if train.compile and packing:  # packed rows are full, or nearly
        offsets = offsets_of_one_graph(offsets, sequences_of_rows(inputs.data, resolved), train.batch_size_training)
        longest = longest_row(inputs.data, resolved)
        widths = tuple(one_width(width, longest) for width in widths)

    def collate_of(num_rows: int) -> Callable[[list[Any]], Any]:
        num_filled = num_rows if train.compile else 0
        form = BatchForm(inputs.vocab_size, widths, packing, offsets, num_filled, inputs.vision_features)
        collate = resolved.task.make_collator(inputs.processor, empty.model.config, form)
        return SharedRows(collate, context) if context.shares_rows else collate

    return collate_of


def sequences_of_rows(data: RunData, resolved: Resolved) -> np.ndarray:
    """Sequences of each packed row, int64 [rows]; of a stream, of rows made of its first sequences."""
    rows = data.train_rows
    if rows is None:
        rows = make_rows(data.train, batching_strategy="packing", context_length=resolved.context_length)
    return rows.num_sequences


def longest_row(data: RunData, resolved: Resolved) -> int:
    """The most tokens of a packed row of the run. A stream's rows are not known yet, so one may be full."""
    if data.train_rows is None:
        return resolved.context_length
    return max(int(rows.lengths.max(initial=1)) for rows in (data.train_rows, data.eval_rows) if rows is not None)
