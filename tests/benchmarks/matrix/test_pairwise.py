"""Which cases of a product the fast and the slow tests run."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.matrix.pairwise import covering, groups_of
from tests.helpers.pairwise import select_product


@pytest.mark.parametrize(("size", "largest"), [(1, 4), (2, 15)])
def test_a_selection_holds_every_value_or_pair_in_far_fewer_cases(size: int, largest: int) -> None:
    cases = list(itertools.product("abcd", (1, 2, 3), (True, False), "xyz"))
    chosen = [groups_of(cases[place], size) for place in covering(cases, size)]
    assert set().union(*chosen) == set().union(*(groups_of(case, size) for case in cases))
    assert len(chosen) <= largest
    assert len(cases) == 72


def test_pairs_that_no_case_holds_are_not_asked_for() -> None:
    cases = [("one", "plain"), ("two", "plain"), ("two", "sharded")]
    assert covering(cases, 2) == [0, 1, 2]


def test_no_case_is_lost() -> None:
    cases = select_product("ab", (1, 2), "xy")
    assert {getattr(case, "values", case) for case in cases} == set(itertools.product("ab", (1, 2), "xy"))
    marks = [case.marks[0].name for case in cases if hasattr(case, "marks")]
    assert (len(cases), marks.count("slow"), marks.count("full")) == (8, 3, 3)
