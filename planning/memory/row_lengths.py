"""How long the rows of a run are, for a plan: known from its data, or assumed from its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.batches.fullest import BatchShape, Foreseen, foresee_batches, largest_batch
from data.batches.padding import PaddedWidth
from resolving.resolved import Resolved, steps_of_run

_AT_MOST = "as long as rows may be"


@dataclass(frozen=True)
class RowLengths:
    """The widths of a rank's micro-batches, padding included, in tokens.

    One width for the inputs, and another for targets that are apart from them.
    """

    rows: int  # of a micro-batch, unless rows run out
    longest: tuple[int, ...]  # of the fullest micro-batch: it decides whether a run fits
    typical: tuple[int, ...]  # of micro-batches on average
    label_share: float = 1.0  # of the tokens that a loss is computed for
    eval_rows: int = 1
    eval_longest: tuple[int, ...] | None = None  # of an evaluation's widest micro-batch; None: as in training
    packed: bool = False  # several sequences share a row
    fullest_rows: int | None = None  # rows of the fullest micro-batch; None: `rows`
    rivals: tuple[BatchShape, ...] = ()  # one of them may be fuller, by what a plan says that each needs
    first: tuple[BatchShape, ...] = ()  # fuller ones, of the first step alone, which finds no optimizer states
    source: str = ""  # how the fullest micro-batch is known, as a clause

    @property
    def fullest(self) -> BatchShape:
        """The micro-batch that needs the most memory once there are optimizer states."""
        return BatchShape(self.rows if self.fullest_rows is None else self.fullest_rows, self.longest)

    @property
    def is_alike(self) -> bool:
        """Whether the fullest micro-batch is a usual one."""
        return self.fullest == (self.rows, self.typical)

    @property
    def widest_evaluated(self) -> tuple[int, ...]:
        """The widths of an evaluation's widest micro-batch."""
        return self.longest if self.eval_longest is None else self.eval_longest

    def decided(self, need: Callable[[RowLengths], float]) -> RowLengths:
        """The same without rivals: of these, the one with the largest need is the fullest."""
        candidates = [
            replace(self, longest=shape.widths, fullest_rows=shape.rows, rivals=())
            for shape in (self.fullest, *self.rivals)
        ]
        return max(candidates, key=lambda rows: need(replace(rows, first=()))) if self.rivals else self


def rows_of_run(
    resolved: Resolved,
    lengths: Sequence[np.ndarray] | None = None,
    *,
    eval_lengths: Sequence[np.ndarray] | None = None,
    is_start: bool = False,
) -> RowLengths:
    """The rows of a run.

    Packed rows are full. Padded ones are as wide as the longest of their micro-batch.

    Args:
        lengths: tokens of each row of the data, and of each target if targets are apart, if the data is at hand.
            Else only the limits are known, and lengths count as spread evenly up to them.
        eval_lengths: the same of the rows of an evaluation; None: as long as those of training.
        is_start: the lengths are of the first rows alone, as of a stream; rows behind them may be longer.
    """
    train, batches, widths = resolved.config.train_config, resolved.batches, resolved.widths
    rows, eval_rows = batches.rows_per_micro_batch, train.val_batch_size
    if lengths is not None and not is_start:
        rows = min(rows, len(lengths[0]))  # the first ranks get full micro-batches while there are rows
    if eval_lengths is not None:
        eval_rows = min(eval_rows, len(eval_lengths[0]))
    if train.batching_strategy == "packing":
        full = resolved.lengths
        return RowLengths(rows, full, full, eval_rows=eval_rows, packed=True, source="packed rows are full")
    eval_longest = None
    if eval_lengths is not None and len(eval_lengths[0]):
        eval_longest = largest_batch(eval_lengths, widths, batches).widths  # evaluations begin with the longest rows
    if lengths is None or is_start:
        typical = [evenly_spread(limit, rows) for limit in resolved.lengths]
        if lengths is not None:
            typical = [mean_width(of, rows, width) for width, of in zip(widths, lengths, strict=True)]
        unknown = "the data is not at hand" if lengths is None else "what a stream goes on with is not known"
        return RowLengths(
            rows,
            resolved.lengths,
            tuple(typical),
            eval_rows=eval_rows,
            eval_longest=eval_longest,
            source=f"{unknown}: {_AT_MOST}",
        )
    num_steps = steps_of_run(train, batches.num_steps(len(lengths[0])))
    fills_rows = bool(train.compile)
    foreseen = foresee_batches(lengths, widths, batches, seed=train.seed, num_steps=num_steps, fills_rows=fills_rows)
    source = f"the fullest of the run's {num_steps:,} steps"
    if foreseen is None:
        typical = [mean_width(of, rows, width) for width, of in zip(widths, lengths, strict=True)]
        foreseen = Foreseen([largest_batch(lengths, widths, batches, fills_rows=fills_rows)], [], tuple(typical))
        source = "as wide as the longest row: to order so many rows for a plan takes too long"
    if foreseen.first:
        fuller = ", ".join(
            f"{shape.rows} x {' and '.join(f'{width:,}' for width in shape.widths)}" for shape in foreseen.first
        )
        source += f" but the first, which has {fuller} tokens and no optimizer states yet"
    fullest, *rivals = foreseen.fullest
    return RowLengths(
        rows,
        fullest.widths,
        foreseen.typical,
        eval_rows=eval_rows,
        eval_longest=eval_longest,
        fullest_rows=fullest.rows,
        rivals=tuple(rivals),
        first=tuple(foreseen.first),
        source=source,
    )


def mean_width(lengths: np.ndarray, rows: int, width: PaddedWidth) -> int:
    """The mean width of micro-batches of so many rows, drawn at random: the mean of the longest of them."""
    ordered = np.sort(lengths)
    below = np.arange(len(ordered) + 1) / len(ordered)  # the share of rows up to each place
    return int(np.sum(width.of(ordered) * np.diff(below**rows)))


def evenly_spread(limit: int, rows: int) -> int:
    """The mean of the longest of so many rows if all lengths up to the limit are equally likely."""
    return round(limit * rows / (rows + 1))
