"""Which cases of a product are enough for every value, or every pair of values, to occur."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

Values = Sequence[Hashable]


def groups_of(values: Values, size: int) -> set[Any]:
    """The values, each with its place, in groups of this size: pairs for 2."""
    return set(itertools.combinations(enumerate(values), size))


def covering(cases: Sequence[Values], size: int) -> list[int]:
    """The places of cases that hold every group of values that any case holds; the same ones every time.

    Greedy: the next case is the first of those that add the most groups.
    """
    groups = [groups_of(values, size) for values in cases]
    missing, chosen = set[Any]().union(*groups), list[int]()
    while missing:
        place = max(range(len(cases)), key=lambda place: (len(groups[place] & missing), -place))
        chosen.append(place)
        missing -= groups[place]
    return sorted(chosen)
