"""Shapes that a processor refuses are found with few trials."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from data.images.shapes import Size, refused_sizes


@pytest.mark.parametrize(
    ("is_refused", "refused", "num_trials"),
    [
        (lambda width, height: False, [], 2),  # the narrowest and the smallest
        (lambda width, height: max(width, height) > 200 * min(width, height), [(1, 900), (4000, 2)], 4),
        (lambda width, height: min(width, height) < 3, [(1, 900), (1, 1), (4000, 2)], 5),
    ],
    ids=["none", "narrow", "small"],
)
def test_the_most_extreme_sizes_are_tried_until_one_is_taken(
    is_refused: Callable[[int, int], bool], refused: list[Size], num_trials: int
) -> None:
    tried: list[Size] = []

    def refusal_of(size: Size) -> str | None:
        tried.append(size)
        return "no" if is_refused(*size) else None

    usual = [(width, height) for width in range(200, 260) for height in range(200, 260)]
    found = refused_sizes([(4000, 2), *usual, (1, 1), (1, 900), (3, 3)], refusal_of)
    assert sorted(found) == sorted(refused)
    assert len(tried) == len(set(tried)) == num_trials
