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


def select(
    cases: Iterable[Any], values: Callable[[Any], Values] = tuple, *, fast: Callable[[Any], bool] = lambda case: True
) -> list[Any]:
    """All cases for `parametrize`: those that only the pairs need are marked `slow`, those that nothing needs `full`.

    Args:
        cases: objects, or tuples if `parametrize` has several names.
        values: of a case, what is to occur, alone and in pairs.
        fast: whether a case may be a fast test. Cases that are dear are not if fast tests elsewhere show their values.
    """
    cases = list(cases)
    singles, pairs = (set(covering([values(case) for case in cases], size)) for size in (1, 2))
    marks = [pytest.mark.slow if place in singles | pairs else pytest.mark.full for place in range(len(cases))]
    are_fast = [place in singles and fast(case) for place, case in enumerate(cases)]
    return [
        case if is_fast else _marked(case, mark) for case, is_fast, mark in zip(cases, are_fast, marks, strict=True)
    ]


def select_product(*factors: Iterable[Hashable], fast: Callable[[Any], bool] = lambda case: True) -> list[Any]:
    """As `itertools.product`, marked as by `select`."""
    return select(itertools.product(*factors), fast=fast)


def select_values(cases: Sequence[Any], values: Callable[[Any], Values], *, fast: Callable[[Any], bool]) -> list[Any]:
    """All cases: the fast ones, those marked `slow` that single values need, and the rest, marked `full`."""
    needed = set(covering([values(case) for case in cases], 1))
    marks = [pytest.mark.slow if place in needed else pytest.mark.full for place in range(len(cases))]
    return [case if fast(case) else _marked(case, mark) for case, mark in zip(cases, marks, strict=True)]


def slow_but(first: int, cases: Iterable[Any], *, num_slow: int | None = None) -> list[Any]:
    """The cases, of which those after the first few are marked `slow`, and those after `num_slow` more `full`."""
    last = math.inf if num_slow is None else first + num_slow
    marks = [pytest.mark.slow, pytest.mark.full]
    return [case if place < first else _marked(case, marks[place >= last]) for place, case in enumerate(cases)]


def keep_fast(cases: Iterable[Any], fast: Iterable[Any], *, full: Iterable[Any] = ()) -> list[Any]:
    """The cases, of which those that are not `fast` are marked `slow`, or `full`."""
    cases, fast, full = list(cases), list(fast), list(full)
    assert all(case in cases for case in [*fast, *full]), "no such case"
    marks = [pytest.mark.full if case in full else pytest.mark.slow for case in cases]
    return [case if case in fast else _marked(case, mark) for case, mark in zip(cases, marks, strict=True)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
