"""Selections of a product's cases: a few for `make test`, more for `make test-slow`, all for `make test-all`.

In the selection of the slow tests every pair of values still occurs, in that of the fast ones every value. Faults that
need three settings at once are rare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

from benchmarks.matrix.pairwise import Values, covering


def select(cases: Iterable[Any], values: Callable[[Any], Values] = tuple) -> list[Any]:
    """All cases for `parametrize`: those that only the pairs need are marked `slow`, those that nothing needs `full`.

    Args:
        cases: objects, or tuples if `parametrize` has several names.
        values: of a case, what is to occur, alone and in pairs.
    """
    cases = list(cases)
    singles, pairs = (set(covering([values(case) for case in cases], size)) for size in (1, 2))
    others = [pytest.mark.slow if place in pairs else pytest.mark.full for place in range(len(cases))]
    return [case if place in singles else _marked(case, others[place]) for place, case in enumerate(cases)]


def select_product(*factors: Iterable[Hashable]) -> list[Any]:
    """As `itertools.product`, marked as by `select`."""
    return select(itertools.product(*factors))


def select_values(cases: Sequence[Any], values: Callable[[Any], Values]) -> list[Any]:
    """All cases, of which those that no single value needs are marked `slow`."""
    needed = covering([values(case) for case in cases], 1)
    return [case if place in needed else _marked(case, pytest.mark.slow) for place, case in enumerate(cases)]


def slow_but(first: int, cases: Iterable[Any], *, num_slow: int | None = None) -> list[Any]:
    """The cases, of which those after the first few are marked `slow`, and those after `num_slow` more `full`."""
    last = math.inf if num_slow is None else first + num_slow
    marks = [pytest.mark.slow, pytest.mark.full]
    return [case if place < first else _marked(case, marks[place >= last]) for place, case in enumerate(cases)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
