"""How long the rows of a run are, for a plan: known from its data, or assumed from its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.batches.counts import ImageTokens
from data.batches.layout import BatchLayout
from data.batches.order import epoch_order
from data.batches.padding import PaddedWidth
from resolving.batches_and_steps import steps_of_run
from resolving.resolved import Resolved
from utils.wording import plural

MOST_ROWS_ORDERED = 2**22  # a second or two
_AT_MOST = "as long as rows may be"


@dataclass(frozen=True)
class RowLengths:
    """The widths of a rank's micro-batches, padding included, in tokens.

    One width for the inputs, and another for targets that are apart from them.
    """

    rows: int  # of a full micro-batch
    widest: tuple[int, ...]  # no micro-batch of the run is wider: it decides whether the run fits
    typical: tuple[int, ...]  # of micro-batches on average
    label_share: float = 1.0  # of the tokens that a loss is computed for
    images: ImageTokens | None = None  # None: not known, or there are none
    teacher_size: int = 0  # likeliest tokens of a teacher at each label token; 0: rows have none
    eval_rows: int = 1
    eval_widest: tuple[int, ...] | None = None  # of an evaluation's micro-batches; None: as in training
    packed: bool = False  # several sequences share a row
    source: str = ""  # how the widest micro-batch is known, as a clause

    @property
    def widest_evaluated(self) -> tuple[int, ...]:
        """The widths of an evaluation's widest micro-batch."""
        return self.widest if self.eval_widest is None else self.eval_widest


def rows_of_run(
    resolved: Resolved,
    lengths: Sequence[np.ndarray] | None = None,
    *,
    eval_lengths: Sequence[np.ndarray] | None = None,
    is_start: bool = False,
) -> RowLengths:
    """The rows of a run.

    Packed rows are as long as the longest of the data, or full. Padded ones are as wide as the longest of their
    micro-batch.

    Args:
        lengths: tokens of each row of the data, and of each target if targets are apart. None: the data is not at
            hand; lengths count as spread evenly up to their limits.
        eval_lengths: the same of the rows of an evaluation; None: as long as those of training.
        is_start: the lengths are of the first rows alone, as of a stream; later rows may be longer.
    """
    train, batches, widths = resolved.config.train_config, resolved.batches, resolved.widths
    rows, eval_rows = batches.rows_per_micro_batch, train.val_batch_size
    if lengths is not None and not is_start and not train.compile:  # compiled layers get full micro-batches
        rows = min(rows, batches.rows_of_epoch(len(lengths[0])))
    if eval_lengths is not None:
        eval_rows = min(eval_rows, len(eval_lengths[0]))
    if train.batching_strategy == "packing":
        return _packed(rows, resolved, None if is_start else lengths, eval_rows, eval_lengths)
    eval_widest = None
    if eval_lengths is not None and len(eval_lengths[0]):
        eval_widest = padded_widths(eval_lengths, widths)
    if lengths is None:
        widest, source = resolved.lengths, f"the data is not at hand: {_AT_MOST}"
        typical = tuple(evenly_spread(limit, rows) for limit in widest)
    elif is_start:
        widest, source = resolved.lengths, f"what a stream goes on with is not known: {_AT_MOST}"
        typical = mean_widths(lengths, widths, rows)
    else:
        num_steps = steps_of_run(train, batches.num_steps(len(lengths[0])))
        widest, typical = foresee_widths(lengths, widths, batches, seed=train.seed, num_steps=num_steps)
        source = f"as wide as the longest row of the run's {plural(num_steps, 'step')}"
    return RowLengths(rows, widest, typical, eval_rows=eval_rows, eval_widest=eval_widest, source=source)


def _packed(
    rows: int,
    resolved: Resolved,
    lengths: Sequence[np.ndarray] | None,
    eval_rows: int,
    eval_lengths: Sequence[np.ndarray] | None,
) -> RowLengths:
    """Packed rows. Little data, or --min_steps, fills them with less than they may hold."""
    full = resolved.lengths
    known = [of for of in (lengths, eval_lengths) if of is not None and len(of[0])]
    if lengths is not None and known:
        # Layers that are compiled see one width; it hardly differs otherwise.
        full = tuple(map(max, zip(*(padded_widths(of, resolved.widths) for of in known), strict=True)))
    source = "packed rows are full" if full == resolved.lengths else f"packed rows hold at most {full[0]:,} tokens"
    return RowLengths(rows, full, full, eval_rows=eval_rows, packed=True, source=source)


def foresee_widths(
    lengths: Sequence[np.ndarray], widths: Sequence[PaddedWidth], layout: BatchLayout, *, seed: int, num_steps: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The widths that no micro-batch of the run exceeds, and the mean widths, over all ranks.

    A run of less than an epoch takes the first rows of that epoch's order. Any other takes every row, so its widest
    micro-batch holds the longest. The longest source and the longest target count as if they met.

    Args:
        lengths: tokens of each row, int64 [rows]; of each target, if they are apart.
        num_steps: of the run, from its first epoch on.
    """
    num_rows, size = len(lengths[0]), layout.rows_per_micro_batch
    if num_rows > MOST_ROWS_ORDERED:
        return padded_widths(lengths, widths), mean_widths(lengths, widths, size)
    order = epoch_order(num_rows, seed=seed, epoch=0, global_batch_size=layout.global_batch_size, lengths=lengths[0])
    order = order[: min(layout.rows_of_epoch(num_rows), num_steps * layout.global_batch_size)]
    # A global batch is a multiple of a micro-batch, so all ranks' micro-batches follow one another in the order.
    full = order[: max(size, len(order) // size * size)]  # without the rows of a smaller last one
    starts = np.arange(0, len(full), size)
    typical = [
        round(float(width.of(np.maximum.reduceat(of[full], starts)).mean()))
        for width, of in zip(widths, lengths, strict=True)
    ]
    is_one_epoch = num_steps <= layout.num_steps(num_rows)
    taken = [of[order] for of in lengths] if is_one_epoch else lengths
    return padded_widths(taken, widths), tuple(typical)


def padded_widths(lengths: Sequence[np.ndarray], widths: Sequence[PaddedWidth]) -> tuple[int, ...]:
    """The widths of a micro-batch with the longest of these rows, and the longest target."""
    return tuple(int(width.of(int(of.max()))) for width, of in zip(widths, lengths, strict=True))


def mean_widths(lengths: Sequence[np.ndarray], widths: Sequence[PaddedWidth], rows: int) -> tuple[int, ...]:
    """The mean widths of micro-batches of `rows` rows drawn at random: the expected length of the longest of them."""
    found = []
    for width, of in zip(widths, lengths, strict=True):
        # The i-th shortest of n rows is a micro-batch's longest with probability (i / n)^rows - ((i - 1) / n)^rows.
        below = np.arange(len(of) + 1) / len(of)
        found.append(int(np.sum(width.of(np.sort(of)) * np.diff(below**rows))))
    return tuple(found)


def evenly_spread(limit: int, rows: int) -> int:
    """The expected length of the longest of `rows` rows if all lengths up to the limit are equally likely."""
    return round(limit * rows / (rows + 1))
