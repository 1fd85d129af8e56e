"""Tokens, labels and attended pairs of a run's rows, for the time that a plan foresees."""

from __future__ import annotations

import numpy as np

from data.batches.counts import BatchCounts
from data.batches.rows import Rows
from planning.memory.row_lengths import RowLengths

_NUM_DRAWS = 256  # of micro-batches, to see how much ranks differ
_MAX_ROWS_DRAWN = 2**20  # in all: each takes some 100 bytes


def row_counts(rows: Rows) -> np.ndarray:
    """The counts of each row by itself, int64 [rows, fields of BatchCounts]."""
    sequences = rows.sequences
    lengths, labels = sequences.lengths.astype(np.int64), sequences.num_label_tokens.astype(np.int64)
    if sequences.has_targets:
        targets = np.diff(sequences.label_offsets).astype(np.int64)
        of_decoder = [targets, targets * (targets + 1) // 2, lengths * targets]
        columns = [labels, lengths + targets, lengths**2, *of_decoder]
    else:
        columns = [labels, lengths, lengths * (lengths + 1) // 2, *[np.zeros_like(lengths)] * 3]
    return np.add.reduceat(np.stack(columns, axis=1)[rows.indices], rows.offsets[:-1], axis=0)


def mean_counts(counts: np.ndarray, num_rows: int) -> BatchCounts:
    """Of a micro-batch of so many rows, on average."""
    return BatchCounts(*map(round, counts.mean(axis=0) * num_rows))


def slowest_counts(counts: np.ndarray, num_rows: int, world_size: int) -> BatchCounts:
    """Of the largest of as many micro-batches as there are ranks: the others wait for it. Drawn at random.

    Micro-batches of very many rows hardly differ: their mean is taken.
    """
    num_draws = min(_NUM_DRAWS, _MAX_ROWS_DRAWN // (world_size * num_rows))
    if world_size == 1 or num_draws == 0:
        return mean_counts(counts, num_rows)
    drawn = np.random.default_rng(0).integers(0, len(counts), (num_draws, world_size, num_rows))
    of_ranks = counts[drawn].sum(axis=2)  # [draws, ranks, fields]
    largest = of_ranks[..., BatchCounts._fields.index("num_tokens")].argmax(axis=1)
    return mean_counts(of_ranks[np.arange(num_draws), largest], 1)


def assumed_counts(rows: RowLengths) -> BatchCounts:
    """Of a micro-batch if the data are not at hand: each row one sequence of the typical length, all of it learned."""
    width, *targets = rows.typical
    num_rows = rows.rows
    if not targets:
        tokens = num_rows * width
        return BatchCounts(round(rows.label_share * tokens), tokens, num_rows * width * (width + 1) // 2)
    (target,) = targets
    of_decoder = (num_rows * target, num_rows * target * (target + 1) // 2, num_rows * width * target)
    return BatchCounts(num_rows * target, num_rows * (width + target), num_rows * width**2, *of_decoder)
