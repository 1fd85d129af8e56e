"""The selection of cases that `make test` runs of a product."""

from __future__ import annotations

import itertools

from tests.helpers.pairwise import pairs_of, pairwise


def test_a_selection_holds_every_pair_in_far_fewer_cases() -> None:
    cases = list(itertools.product("abcd", (1, 2, 3), (True, False), "xyz"))
    chosen = [cases[place] for place in pairwise(cases)]
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) <= 15
    assert len(cases) == 72


def test_pairs_that_no_case_holds_are_not_asked_for() -> None:
    cases = [("one", "plain"), ("two", "plain"), ("two", "sharded")]
    assert pairwise(cases) == [0, 1, 2]
