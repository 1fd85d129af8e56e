"""The order of training: a function of seed, epoch and global batch size alone, for a whole data set and a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

from data.sequences import Row, TokenSequence

WINDOW_ROWS = 1024  # sorted together: enough for neighbours of like length, few enough that epochs differ
MIN_WINDOWS = 4  # so that small data, too, has other global batches in every epoch
BATCHES_PER_WINDOW = 32  # of a stream under padding: global batches whose sequences are sorted by length together

T = TypeVar("T")


def epoch_order(
    num_rows: int, *, seed: int | None, epoch: int, global_batch_size: int, lengths: np.ndarray | None = None
) -> np.ndarray:
    """All rows in the order in which an epoch takes them, `global_batch_size` of them in each optimizer step.

    Without `lengths` the rows are shuffled. With `lengths` they are shuffled, sorted by length inside windows of about
    `WINDOW_ROWS` and cut into global batches, which are shuffled. So a global batch holds rows of like length, longest
    first, and so does each of its micro-batches, over all ranks. A smaller last batch stays last; its rows are a random
    choice.

    Args:
        seed: None for evaluation, which is not shuffled: file order, or all rows sorted, longest first.
        epoch: counted from 0.
        lengths: tokens of each row, [num_rows], if rows are padded to the longest of their batch.

    Returns:
        Row indices, int64 [num_rows].
    """
    if seed is None:
        return np.arange(num_rows) if lengths is None else _longest_first(np.arange(num_rows), lengths)
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(num_rows)
    if lengths is None:
        return shuffled
    num_batches = num_rows // global_batch_size
    num_in_batches = num_batches * global_batch_size
    num_windows = max(MIN_WINDOWS, round(num_in_batches / WINDOW_ROWS))
    windows = np.array_split(shuffled[:num_in_batches].reshape(num_batches, global_batch_size), num_windows)
    batches = np.concatenate(
        [_longest_first(window.reshape(-1), lengths).reshape(-1, global_batch_size) for window in windows]
    )
    rest = _longest_first(shuffled[num_in_batches:], lengths)
    return np.concatenate([batches[generator.permutation(num_batches)].reshape(-1), rest])


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows sorted by length; rows of one length stay in their order."""
    return rows[np.argsort(-lengths[rows], kind="stable")]


def shuffled(items: Iterable[T], buffer_size: int, rng: np.random.Generator) -> Iterator[T]:
    """All items of a stream, each drawn evenly from a buffer of `buffer_size` that were read and not yet given."""
    iterator = iter(items)
    buffer = list(islice(iterator, buffer_size))
    if len(buffer) == buffer_size:
        places = _places(buffer_size, rng)
        for item in iterator:
            place = next(places)
            yield buffer[place]
            buffer[place] = item
    order = rng.permutation(len(buffer)).tolist()
    for place in order:
        yield buffer[place]


def _places(size: int, rng: np.random.Generator) -> Iterator[int]:
    """Endless random indices below `size`, drawn many at a time: a single draw costs as much as a sequence."""
    while True:
        yield from rng.integers(size, size=1024).tolist()


def in_batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """`size` rows at a time; the last batch may be smaller."""
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def batched_by_length(sequences: Iterable[TokenSequence], size: int, rng: np.random.Generator) -> Iterator[list[Row]]:
    """Batches of sequences of like length, one sequence per row, shortest first; the last batch may be smaller.

    The sequences of `BATCHES_PER_WINDOW` batches are sorted by length and cut; these batches come in random order.
    """
    for window in in_batches(([sequence] for sequence in sequences), BATCHES_PER_WINDOW * size):
        num_whole = len(window) // size
        rows = sorted(window[: num_whole * size], key=_num_tokens)
        for batch in rng.permutation(num_whole).tolist():
            yield rows[batch * size : (batch + 1) * size]
        if rest := window[num_whole * size :]:
            yield sorted(rest, key=_num_tokens)


def _num_tokens(row: Row) -> int:
    return len(row[0].input_ids)
