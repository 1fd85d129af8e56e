"""Exact match: whether an answer is its reference."""

from __future__ import annotations

from evaluation.measure import Measure, Scorer


class ExactMatch(Measure):
    """100 if the text is the reference, white space aside, else 0."""

    NAME = "exact_match"
    NAMES = ("exact_match",)
    IS_DEFAULT = False

    def make_scorer(self) -> Scorer:
        return lambda reference, text: {"exact_match": 100.0 * (text.split() == reference.split())}
