"""Leaves points out of long curves, and keeps their extremes."""

from __future__ import annotations

from collections.abc import Sequence

Column = Sequence[float | int | None]


def kept_points(columns: Sequence[Column], most: int) -> list[int]:
    """The numbers of the points to draw, in order: all if there are no more than `most`, else about as many.

    The points are cut into spans of equal length. Of each span, the points with the lowest and highest value of each
    column are kept, and the first and last point of all. So each curve keeps its shape, as in the M4 aggregation of
    Jugel et al., VLDB 2014, which adds each span's ends.

    Args:
        columns: of equal length. None is no value.
    """
    num_points = len(columns[0]) if columns else 0
    if num_points <= most:
        return list(range(num_points))
    num_spans = max(1, (most - 2) // (2 * len(columns)))
    kept = {0, num_points - 1}
    for span in range(num_spans):
        points = range(num_points * span // num_spans, num_points * (span + 1) // num_spans)
        for column in columns:
            values = [(column[point], point) for point in points if column[point] is not None]
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
    """For each point, the mean of the values among the last `span` points, itself included."""
    means: list[float | None] = []
    for point in range(len(column)):
        values = [value for value in column[max(0, point - span + 1) : point + 1] if value is not None]
        means.append(sum(values) / len(values) if values else None)
    return means
