"""The micro-batches of a padded run that may need the most memory, from the lengths of its rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.batches.layout import BatchLayout
from data.batches.order import epoch_order
from data.batches.padding import PaddedWidth

MOST_ROWS_ORDERED = 2**22  # in all epochs together: a second or two
_ROWS_PER_EPOCH = 2**8  # what an epoch costs besides its rows, in rows


class BatchShape(NamedTuple):
    """How large a micro-batch is, padding included."""

    rows: int
    widths: tuple[int, ...]  # tokens of a row, and of a target if targets are apart


class Foreseen(NamedTuple):
    """The shapes of a run's micro-batches that matter for a plan."""

    fullest: list[BatchShape]  # one of these needs the most memory, once the optimizer has its states
    first: list[BatchShape]  # those of the first step, which finds no states yet, that are fuller than all of these
    typical: tuple[int, ...]  # mean widths of those with the most rows, in the epochs that were looked at


def largest_batch(
    lengths: Sequence[np.ndarray], widths: Sequence[PaddedWidth], layout: BatchLayout, *, fills_rows: bool = False
) -> BatchShape:
    """The shape that no micro-batch of these rows exceeds, in whatever order they come; arguments as below."""
    rows = layout.rows_per_micro_batch
    if not fills_rows:
        rows = min(rows, layout.rows_of_epoch(len(lengths[0])))
    return BatchShape(rows, tuple(int(width.of(int(of.max()))) for width, of in zip(widths, lengths, strict=True)))


def foresee_batches(
    lengths: Sequence[np.ndarray],
    widths: Sequence[PaddedWidth],
    layout: BatchLayout,
    *,
    seed: int,
    num_steps: int,
    fills_rows: bool = False,
) -> Foreseen | None:
    """The shapes of a run's micro-batches, over all ranks and epochs.

    Micro-batches that may need the most memory have the most tokens, in total or on one side, or the most pairs of
    tokens. One of few rows may need more than a full one of shorter rows, so the choice is left to a plan of each.
    The first step stands apart: the optimizer makes its states at its end. If it is the only one, it counts as if they
    were there.

    Args:
        lengths: tokens of each row, int64 [rows]; of each target, if they are apart.
        num_steps: of the run, from its first epoch on.
        fills_rows: collators fill each micro-batch up to all of its rows, as compiled layers ask.

    Returns:
        None if that would take the order of more than MOST_ROWS_ORDERED rows.
    """
    num_rows, size = len(lengths[0]), layout.rows_per_micro_batch
    largest = largest_batch(lengths, widths, layout, fills_rows=fills_rows)
    found = first = np.empty((0, 1 + len(lengths)), dtype=np.int64)
    sums, num_summed = np.zeros(len(lengths)), 0
    num_of_first = layout.global_batch_size if num_steps > 1 else 0
    num_ordered = epoch = 0
    while num_steps > 0:
        num_ordered += num_rows + _ROWS_PER_EPOCH
        if num_ordered > MOST_ROWS_ORDERED:
            return None
        order = epoch_order(
            num_rows, seed=seed, epoch=epoch, global_batch_size=layout.global_batch_size, lengths=lengths[0]
        )
        order = order[: min(layout.rows_of_epoch(num_rows), num_steps * layout.global_batch_size)]
        # A global batch is a multiple of a micro-batch, so all ranks' micro-batches follow one another in the order.
        starts = np.arange(0, len(order), size)
        rows = np.full(len(starts), size) if fills_rows else np.diff(starts, append=len(order))
        of_epoch = [width.of(np.maximum.reduceat(of[order], starts)) for width, of in zip(widths, lengths, strict=True)]
        shapes = np.stack([rows, *of_epoch], axis=1)
        full = shapes[rows == largest.rows]
        sums, num_summed = sums + full[:, 1:].sum(axis=0), num_summed + len(full)
        if epoch == 0:
            first, shapes = shapes[starts < num_of_first], shapes[starts >= num_of_first]
        found = _fullest(np.concatenate([found, shapes]))
        if (found == [largest.rows, *largest.widths]).all(axis=1).any():  # no later epoch has a fuller one
            found = np.array([[largest.rows, *largest.widths]])
            break
        num_steps -= layout.num_steps(num_rows)
        epoch += 1
    return Foreseen(
        _batch_shapes(found),
        _batch_shapes(_fullest(first[(_needs(first) > _needs(found).max(axis=0)).any(axis=1)])),
        tuple(round(total / num_summed) for total in sums.tolist()),
    )


def _fullest(shapes: np.ndarray) -> np.ndarray:
    """The shapes that have the most of some need; int64 [shapes, rows and widths]."""
    return np.unique(shapes[_needs(shapes).argmax(axis=0)], axis=0) if len(shapes) else shapes


def _needs(shapes: np.ndarray) -> np.ndarray:
    """Tokens of each side and of both, and pairs of tokens, of each shape; int64 [shapes, needs]."""
    rows, widths = shapes[:, :1], shapes[:, 1:]
    return np.concatenate(
        [rows * widths, rows * widths.sum(axis=1, keepdims=True), rows * (widths**2).sum(axis=1, keepdims=True)], axis=1
    )


def _batch_shapes(shapes: np.ndarray) -> list[BatchShape]:
    return [BatchShape(rows, tuple(widths)) for rows, *widths in shapes.tolist()]
