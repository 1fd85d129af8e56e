"""A selection of a product's cases in which every pair of values still occurs; the others are for `make test-all`.

Faults that need three settings at once are rare; those that need one or two are found by the selection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs_of(values: Sequence[Hashable]) -> set[Pair]:
    return set(itertools.combinations(enumerate(values), 2))


def pairwise(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """The places of cases that hold every pair of values that any case holds; the same ones every time.

    Greedy: the next case is the first of those that add the most pairs.
    """
    pairs = [pairs_of(values) for values in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        place = max(range(len(cases)), key=lambda place: (len(pairs[place] & missing), -place))
        chosen.append(place)
        missing -= pairs[place]
    return sorted(chosen)


def select(cases: Sequence[Any], values: Callable[[Any], Sequence[Hashable]] = tuple) -> list[Any]:
    """All cases for `parametrize`; those outside the selection are marked `full`.

    Args:
        cases: objects, or tuples where `parametrize` has several names.
        values: of a case, what its pairs are of.
    """
    chosen = set(pairwise([values(case) for case in cases]))

    def marked_full(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)

    return [case if place in chosen else marked_full(case) for place, case in enumerate(cases)]


def select_product(*factors: Iterable[Hashable]) -> list[Any]:
    """As `itertools.product`; the cases outside the selection are marked `full`."""
    return select(list(itertools.product(*factors)))
