"""Whole documents into rows of a fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Offsets = Literal["none", "shared", "all"]
"""Of which rows a model is told where documents begin: of none, of those that several documents share, or of all."""


def pack_best_fit(lengths: Sequence[int] | np.ndarray, row_length: int) -> list[list[int]]:
    """Put every document, whole, into the open row it fills best; open a new row where it fits none.

    Best-fit decreasing: documents are placed longest first, ties in the given order, which fills rows to within
    22 % of the optimum in the worst case and far closer on text (Johnson, "Near-optimal bin packing algorithms",
    1973). Deterministic.

    Args:
        lengths: tokens of each document, none above `row_length`.
        row_length: tokens a row can hold.

    Returns:
        For each row, the indices of its documents.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    wrong = (lengths <= 0) | (lengths > row_length)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(f"document {index} has {lengths[index]} tokens; a row holds 1 to {row_length}")
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), dtype=np.int64)  # by place in longest_first
    rows_with: dict[int, list[int]] = {}  # free tokens -> open rows
    spaces = 0  # a set as bits: bit n is set where rows_with[n] holds a row. The smallest that fits is one shift away.
    num_rows = place = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = place + count
        while place < end:
            fitting = spaces >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                row = rows_with[free].pop()
                if not rows_with[free]:
                    spaces ^= 1 << free
            else:
                free, row = row_length, num_rows
                num_rows += 1
            # What is left of the row that fits best fits the next document of this length best too, while it fits.
            num_placed = min(free // length, end - place)
            row_of[place : place + num_placed] = row
            place += num_placed
            free -= num_placed * length
            if free:
                rows_with.setdefault(free, []).append(row)
                spaces |= 1 << free
    documents = longest_first[np.argsort(row_of, kind="stable")]
    return [part.tolist() for part in np.split(documents, np.cumsum(np.bincount(row_of))[:-1])] if num_rows else []
