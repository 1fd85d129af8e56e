"""Documents as they come -> rows: shuffled in a buffer, packed or batched by length, without knowing what follows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

from data.loader import Document
from data.packing import pack_best_fit

T = TypeVar("T")
Row = list[Document]

OPEN_ROWS = 64
"""Rows that wait for documents that fit: 99.7 % full on dialogues, 98 % where lengths are even up to a whole row."""

BATCHES_PER_WINDOW = 32
"""Global batches whose documents are sorted by length together, under padding."""


def shuffled(items: Iterable[T], buffer_size: int, rng: np.random.Generator) -> Iterator[T]:
    """All items, each drawn evenly from the `buffer_size` that have been read and not been given yet."""
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
    """Endless random indices below `size`; drawn many at a time, since a single draw costs as much as a document."""
    while True:
        yield from rng.integers(size, size=1024).tolist()


def packed(documents: Iterable[Document], row_length: int, num_open_rows: int = OPEN_ROWS) -> Iterator[Row]:
    """Whole documents into rows: each into the open row it fills best; a full row, or the fullest of too many, goes on.

    Bounded-space best fit (Csirik and Johnson, "Bounded space on-line bin packing", 1991). When the documents end,
    those of the rows still open are packed anew, longest first.
    """
    rows: dict[int, Row] = {}
    spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
    num_rows = 0
    for document in documents:
        length = len(document[0])
        position = bisect_left(spaces, (length, 0))
        if position < len(spaces):
            free, row = spaces.pop(position)
        else:
            if len(spaces) == num_open_rows:
                yield rows.pop(spaces.pop(0)[1])
            free, row, num_rows = row_length, num_rows, num_rows + 1
            rows[row] = []
        rows[row].append(document)
        if free == length:
            yield rows.pop(row)
        else:
            insort(spaces, (free - length, row))
    left = [document for row in rows.values() for document in row]
    for places in pack_best_fit([len(ids) for ids, _, _ in left], row_length):
        yield [left[place] for place in places]


def in_batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """So many rows at a time; the last time perhaps fewer."""
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def batched_by_length(documents: Iterable[Document], size: int, rng: np.random.Generator) -> Iterator[list[Row]]:
    """Batches of documents of like length, one document per row, shortest first; the last batch perhaps smaller.

    The documents of some batches are sorted by length, cut, and the batches given in random order.
    """
    for window in in_batches(([document] for document in documents), BATCHES_PER_WINDOW * size):
        num_whole = len(window) // size
        rows = sorted(window[: num_whole * size], key=lambda row: len(row[0][0]))
        for batch in rng.permutation(num_whole).tolist():
            yield rows[batch * size : (batch + 1) * size]
        if rest := window[num_whole * size :]:
            yield sorted(rest, key=lambda row: len(row[0][0]))
