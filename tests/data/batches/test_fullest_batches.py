"""What a plan foresees of a padded run's micro-batches is what the loaders of its ranks yield in its steps."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import fullest as fullest_batches
from data.batches.fullest import BatchShape, foresee_batches, largest_batch
from data.batches.layout import BatchLayout
from data.batches.padding import PaddedWidth
from data.batches.rows import Rows
from data.batches.step_loader import StepLoader
from data.sequences.tokenized import Row, Sequences

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
    for rank in range(layout.world_size):
        loader = StepLoader(rows, layout, rank=rank, seed=seed, collate=shape)
        epochs = -(-num_steps // len(loader))
        steps = (step for epoch in range(epochs) for step in loader.epoch(epoch))
        for number, step in enumerate(islice(steps, num_steps)):
            found[number] += [batch for batch in step if batch[0]]
    return found


@given(num_rows=st.integers(1, 50), layout=LAYOUTS, seed=st.integers(0, 99), num_steps=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_fullest_batches_are_those_that_the_loaders_yield(
    num_rows: int, layout: BatchLayout, seed: int, num_steps: int
) -> None:
    generator = np.random.default_rng(seed)
    lengths = [generator.integers(1, most + 1, num_rows) for most in (40, 9)]
    offsets = [np.concatenate([[0], np.cumsum(of)]) for of in lengths]
    tokens = [np.zeros(of[-1], dtype=np.int32) for of in offsets]
    sequences = Sequences(*tokens, *offsets, source_rows=np.arange(num_rows))
    rows = Rows(sequences, np.arange(num_rows), np.arange(num_rows + 1), packed=False)
    first, *others = map(np.array, yielded(rows, layout, seed=seed, num_steps=num_steps))
    later = np.concatenate(others) if others else first
    foreseen = foresee_batches(lengths, [INPUTS, TARGETS], layout, seed=seed, num_steps=num_steps)
    assert foreseen is not None

    def most(shapes: np.ndarray) -> list[int]:
        rows, widths = shapes[:, 0], shapes[:, 1:]
        needs = (*(rows * widths[:, side] for side in (0, 1)), rows * widths.sum(1), rows * (widths**2).sum(1))
        return [int(need.max()) for need in needs]

    def array(shapes: list[BatchShape]) -> np.ndarray:
        return np.array([[rows, *widths] for rows, widths in shapes], dtype=np.int64).reshape(-1, 3)

    def kinds(shapes: np.ndarray) -> set[tuple[int, ...]]:
        return set(map(tuple, shapes.tolist()))

    fullest, fuller = array(foreseen.fullest), array(foreseen.first)
    assert most(fullest) == most(later)
    assert kinds(fullest) <= kinds(later)
    assert most(np.concatenate([fullest, fuller])) == most(np.concatenate([later, first]))
    assert kinds(fuller) <= kinds(first), "the first step's own"
    assert all(any(np.greater(most(np.array([shape])), most(fullest))) for shape in fuller), "only those that matter"
    assert all(foreseen.typical <= np.concatenate([later, first]).max(0)[1:])


def test_rows_that_a_compiled_run_fills_up_and_data_too_large_to_order() -> None:
    lengths, layout = [np.array([5, 5, 5, 5, 25])], BatchLayout(4, 1, 1)

    def foreseen(**more: bool) -> list[BatchShape]:
        found = [foresee_batches(lengths, [INPUTS], layout, seed=seed, num_steps=4, **more) for seed in range(9)]
        return [shape for one in found if one is not None for shape in one.fullest]

    assert {BatchShape(4, (8,)), BatchShape(1, (28,))} <= set(foreseen()), "with some seed the longest row is left over"
    assert set(foreseen(fills_rows=True)) == {BatchShape(4, (28,))}
    many = [np.full(fullest_batches.MOST_ROWS_ORDERED, 3)]
    assert foresee_batches(many, [INPUTS], layout, seed=1, num_steps=1) is None
    assert largest_batch(many, [INPUTS], layout) == BatchShape(4, (4,))
