"""Whole documents into rows of a fixed length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
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
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 0 < length <= row_length:
            raise ValueError(f"document {index} has {length} tokens; a row holds 1 to {row_length}")
        position = bisect_left(spaces, (length, 0))
        if position == len(spaces):
            rows.append([index])
            free, row = row_length - length, len(rows) - 1
        else:
            free, row = spaces.pop(position)
            rows[row].append(index)
            free -= length
        if free > 0:
            insort(spaces, (free, row))
    return rows
