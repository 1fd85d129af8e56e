"""Leaves points out of long curves, and keeps their extremes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    values = np.array([np.nan if value is None else value for value in column], dtype=np.float64)
    is_there = np.array([value is not None for value in column], dtype=bool)
    is_finite = is_there & np.isfinite(values)
    sums = _trailing_sums(np.where(is_finite, values, 0.0), span)
    num_values, num_finite = _trailing_sums(is_there, span), _trailing_sums(is_finite, span)
    means: list[float | None] = [
        float(total / count) if count else None for total, count in zip(sums, num_values, strict=True)
    ]
    # A running sum would stay infinite after the first infinite loss.
    for point in np.flatnonzero(num_values != num_finite):
        last = slice(max(0, point - span + 1), point + 1)
        means[point] = float(values[last][is_there[last]].mean())
    return means


def _trailing_sums(values: np.ndarray, span: int) -> np.ndarray:
    """For each point the sum of the last `span` values; in time that does not grow with `span`."""
    sums = np.concatenate([[0], np.cumsum(values)])
    places = np.arange(1, len(sums))
    return sums[places] - sums[np.maximum(places - span, 0)]
