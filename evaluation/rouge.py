"""ROUGE: what two texts share of words and word sequences (Lin, "ROUGE", 2004), by the package rouge-score."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evaluation.measure import Measure, Scorer
from utils.wording import plural


class Rouge(Measure):
    """F-measures, 0 to 100, of stemmed words: single ones, pairs, and the longest common sequence."""

    NAMES = ("rouge1", "rouge2", "rougeL")
    PACKAGE = "rouge-score"

    def make_scorer(self) -> Scorer:
        from rouge_score.rouge_scorer import RougeScorer  # optional

        scorer: Any = RougeScorer(list(self.NAMES), use_stemmer=True)

        def score(reference: str, text: str) -> dict[str, float]:
            return {name: 100 * value.fmeasure for name, value in scorer.score(reference, text).items()}

        return score

    def notes(self, references: Sequence[str]) -> list[str]:
        """A line if rouge-score, which drops all letters but a to z, takes some references for empty."""
        num_empty = sum(not re.search("[a-z0-9]", reference.lower()) for reference in references)
        if not num_empty:
            return []
        return [
            f"eval_generate: ROUGE is 0 for {num_empty:,} of {plural(len(references), 'reference')}: rouge-score "
            "counts letters from a to z and digits alone"
        ]
