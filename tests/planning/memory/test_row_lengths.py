"""The widths that a plan foresees of a padded run's micro-batches are those that the loaders of its ranks yield."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.layout import BatchLayout
from data.batches.padding import PaddedWidth
from data.batches.rows import Rows
from data.batches.step_loader import StepLoader
from data.sequences.tokenized import Row, Sequences
from planning.memory import row_lengths
from planning.memory.row_lengths import foresee_widths

INPUTS, TARGETS = PaddedWidth(4, 30), PaddedWidth(1, 9)
LAYOUTS = st.builds(
    BatchLayout, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 60))
)


def yielded(rows: Rows, layout: BatchLayout, *, seed: int, num_steps: int) -> list[list[tuple[int, int, int]]]:
    """Rows and widths of every micro-batch of each step of the run, over all ranks."""

    def shape(batch: list[Row]) -> tuple[int, int, int]:
        inputs, targets = (max((len(row[0][side]) for row in batch), default=0) for side in (0, 1))
        return len(batch), int(INPUTS.of(inputs)), int(TARGETS.of(targets))

    found: list[list[tuple[int, int, int]]] = [[] for _ in range(num_steps)]
    for rank in range(layout.data_parallel_size):
        loader = StepLoader(rows, layout, rank=rank, seed=seed, collate=shape)
        epochs = -(-num_steps // len(loader))
        steps = (step for epoch in range(epochs) for step in loader.epoch(epoch))
        for number, step in enumerate(islice(steps, num_steps)):
            found[number] += [batch for batch in step if batch[0]]
    return found


@given(num_rows=st.integers(1, 50), layout=LAYOUTS, seed=st.integers(0, 99), num_steps=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_widest_batch_is_as_wide_as_the_widest_that_the_loaders_yield(
    num_rows: int, layout: BatchLayout, seed: int, num_steps: int
) -> None:
    generator = np.random.default_rng(seed)
    lengths = [generator.integers(1, most + 1, num_rows) for most in (40, 9)]
    offsets = [np.concatenate([[0], np.cumsum(of)]) for of in lengths]
    tokens = [np.zeros(of[-1], dtype=np.int32) for of in offsets]
    sequences = Sequences(*tokens, *offsets, source_rows=np.arange(num_rows))
    rows = Rows(sequences, np.arange(num_rows), np.arange(num_rows + 1), packed=False)
    steps = yielded(rows, layout, seed=seed, num_steps=num_steps)
    found = np.concatenate([np.array(step) for step in steps])[:, 1:]
    widest, typical = foresee_widths(lengths, [INPUTS, TARGETS], layout, seed=seed, num_steps=num_steps)
    whole_epochs = num_steps % layout.num_steps(num_rows) == 0 and layout.max_rows_per_epoch is None
    if num_steps <= layout.num_steps(num_rows) or whole_epochs:
        assert list(widest) == found.max(0).tolist()
    assert (widest >= found.max(0)).all(), "whatever the order of later epochs"
    assert (np.array(typical) <= widest).all()


def test_data_too_large_to_order_counts_with_its_longest_row() -> None:
    lengths, layout = np.full(row_lengths.MOST_ROWS_ORDERED + 1, 3), BatchLayout(4, 1, 1)
    lengths[7] = 13
    assert foresee_widths([lengths], [INPUTS], layout, seed=1, num_steps=1) == ((16,), (4,))
