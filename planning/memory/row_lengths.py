"""How long the rows of a run are, for a plan: known from its data, or assumed from its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.padding import PaddedWidth
from planning.resolved import Resolved


@dataclass(frozen=True)
class RowLengths:
    """The widths of a rank's micro-batches, padding included, in tokens.

    One width for the inputs, and another for targets that are apart from them.
    """

    rows: int  # of a micro-batch
    longest: tuple[int, ...]  # of the widest micro-batch: it decides whether a run fits
    typical: tuple[int, ...]  # of micro-batches on average
    label_share: float = 1.0  # of the tokens that a loss is computed for
    eval_rows: int = 1
    packed: bool = False  # several sequences share a row


def rows_of_run(resolved: Resolved, lengths: Sequence[np.ndarray] | None = None) -> RowLengths:
    """The rows of a run.

    Packed rows are full. Padded ones are as wide as the longest of their micro-batch.

    Args:
        lengths: tokens of each row of the data, and of each target if targets are apart, if the data is at hand.
            Else only the limits are known, and lengths count as spread evenly up to them.
    """
    train = resolved.config.train_config
    rows, packed = train.batch_size_training, train.batching_strategy == "packing"
    longest = typical = resolved.lengths
    if lengths is not None:  # no rank has more rows than its share of the data
        rows = min(rows, -(-len(lengths[0]) // resolved.batches.world_size))
    if lengths is not None and not packed:
        longest = tuple(int(width.of(int(of.max()))) for width, of in zip(resolved.widths, lengths, strict=True))
        typical = tuple(mean_width(of, rows, width) for width, of in zip(resolved.widths, lengths, strict=True))
    elif not packed:
        typical = tuple(evenly_spread(limit, rows) for limit in resolved.lengths)
    return RowLengths(rows, longest, typical, eval_rows=train.val_batch_size, packed=packed)


def mean_width(lengths: np.ndarray, rows: int, width: PaddedWidth) -> int:
    """The mean width of micro-batches of so many rows, drawn at random: the mean of the longest of them."""
    ordered = np.sort(lengths)
    below = np.arange(len(ordered) + 1) / len(ordered)  # the share of rows up to each place
    return int(np.sum(width.of(ordered) * np.diff(below**rows)))


def evenly_spread(limit: int, rows: int) -> int:
    """The mean of the longest of so many rows if all lengths up to the limit are equally likely."""
    return round(limit * rows / (rows + 1))
