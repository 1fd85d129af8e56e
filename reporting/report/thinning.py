"""Leaves points out of long curves, and keeps their extremes."""

from __future__ import annotations

from collections.abc import Sequence

Column = Sequence[float | int | None]


def kept_rows(columns: Sequence[Column], most: int) -> list[int]:
    """The numbers of the rows to draw, in order: all if there are no more than `most`, else about as many.

    The rows are cut into spans of equal length. Of each span, the rows with the lowest and highest value of each
    column are kept, and the first and last row of all. So each curve keeps its shape, as in the M4 aggregation of
    Jugel et al., VLDB 2014, which adds each span's ends.

    Args:
        columns: of equal length. None is no value.
    """
    num_rows = len(columns[0]) if columns else 0
    if num_rows <= most:
        return list(range(num_rows))
    num_spans = max(1, (most - 2) // (2 * len(columns)))
    kept = {0, num_rows - 1}
    for span in range(num_spans):
        rows = range(num_rows * span // num_spans, num_rows * (span + 1) // num_spans)
        for column in columns:
            values = [(column[row], row) for row in rows if column[row] is not None]
            if values:
                kept.add(min(values)[1])
                kept.add(max(values)[1])
    return sorted(kept)


def rounded(value: float | int | None, digits: int = 5) -> float | int | None:
    """The number to so many significant digits, for a page that draws it. Whole numbers stay."""
    if value is None or isinstance(value, int):
        return value
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def trailing_means(column: Column, span: int) -> list[float | None]:
    """For each row, the mean of the values among the last `span` rows, itself included."""
    means: list[float | None] = []
    for row in range(len(column)):
        values = [value for value in column[max(0, row - span + 1) : row + 1] if value is not None]
        means.append(sum(values) / len(values) if values else None)
    return means
