"""chrF: what two texts share of character sequences (Popović, 2015), by the package sacrebleu, for every script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.measure import Answer, Measure, Scorer


class ChrF(Measure):
    """F-measure with recall counted twice, 0 to 100, of 1 to 6 characters (sacrebleu's chrF2), over all answers."""

    NAME = "chrf"
    NAMES = ("chrf",)
    IS_DEFAULT = False
    PACKAGE = "sacrebleu"

    def make_scorer(self) -> Scorer:
        chrf = _chrf()
        return lambda reference, text: {"chrf": float(chrf.sentence_score(text, [reference]).score)}

    def total(self, answers: Sequence[Answer]) -> dict[str, float]:
        texts, references = [answer.text for answer in answers], [answer.reference for answer in answers]
        return {"chrf": float(_chrf().corpus_score(texts, [references]).score)}


def _chrf() -> Any:
    from sacrebleu.metrics import CHRF  # optional

    return CHRF()
