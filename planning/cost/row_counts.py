"""Tokens, labels and attended pairs of a run's rows, for the planned time."""

from __future__ import annotations

import numpy as np

from data.batches.counts import BatchCounts, causal_pairs, pairs_of_each
from planning.memory.row_lengths import RowLengths

_NUM_DRAWS = 256  # of micro-batches, to see how much ranks differ
_MAX_ROWS_DRAWN = 2**20  # in all: each takes some 100 bytes


def mean_counts(counts: np.ndarray, num_rows: int) -> BatchCounts:
    """The mean counts of a micro-batch of `num_rows` rows."""
    return BatchCounts(*map(round, counts.mean(axis=0) * num_rows))


def shared_counts(counts: BatchCounts, num_ranks: int) -> BatchCounts:
    """The counts of each of so many ranks that share the rows of a micro-batch."""
    return BatchCounts(*(-(-count // num_ranks) for count in counts))


def slowest_counts(counts: np.ndarray, num_rows: int, world_size: int) -> BatchCounts:
    """The mean counts of the slowest rank's micro-batch, which the others wait for; drawn at random.

    Micro-batches of very many rows hardly differ: their mean is taken.
    """
    num_draws = min(_NUM_DRAWS, _MAX_ROWS_DRAWN // (world_size * num_rows))
    if world_size == 1 or num_draws == 0:
        return mean_counts(counts, num_rows)
    drawn = np.random.default_rng(0).integers(0, len(counts), (num_draws, world_size, num_rows))
    of_ranks = counts[drawn].sum(axis=2)  # [draws, ranks, fields]
    largest = of_ranks[..., BatchCounts._fields.index("num_tokens")].argmax(axis=1)
    return mean_counts(of_ranks[np.arange(num_draws), largest], 1)


def attended_share(counts: np.ndarray | None, rows: RowLengths) -> float:
    """Of the pairs of causal attention in rows as wide as these, those that the documents in packed rows have.

    Args:
        counts: of each row; None: the data is not at hand, and a row is one document.
    """
    if counts is None or not rows.packed:
        return 1.0
    attended = counts[:, BatchCounts._fields.index("num_attended_pairs")].mean()
    return min(1.0, float(attended) / causal_pairs(rows.typical[0]))


def assumed_counts(rows: RowLengths) -> BatchCounts:
    """The counts of a micro-batch if the data is not at hand: each row is one sequence of the typical length."""
    width, *targets = rows.typical
    num_rows = rows.rows
    if not targets:
        tokens = num_rows * width
        return BatchCounts(round(rows.label_share * tokens), tokens, num_rows * causal_pairs(width))
    (target,) = targets
    encoder, decoder, cross = (num_rows * pairs for pairs in pairs_of_each(width, target))
    tokens = num_rows * target
    return BatchCounts(tokens, num_rows * (width + target), encoder, tokens, decoder, cross)
