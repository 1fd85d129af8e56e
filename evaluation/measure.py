"""The base class of measures of the model's answers.

`evaluation/measures.py` lists the measures. --eval_metric chooses among them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from configs.training import TrainConfig

Scorer = Callable[[str, str], Mapping[str, float]]
"""Makes the figures of one answer, by name, from its reference and the text that the model generated."""

PromptScorer = Callable[[str, str, str], Mapping[str, float]]
"""The same, from the prompt as well, which comes first."""


class Answer(NamedTuple):
    """The text that the model generated for one sample."""

    place: int  # of its sample, among those of the Generation
    text: str
    reference: str
    figures: dict[str, float]  # of this answer alone, of all measures


class Measure(ABC):
    """Figures of the model's answers, for the `eval` lines of metrics.jsonl and for --best_metric."""

    NAMES: ClassVar[tuple[str, ...]]
    """The names of its figures, in metrics.jsonl and for --best_metric. No other measure may have them."""

    NAME: ClassVar[str] = ""
    """Its name for --eval_metric; empty: that of its first figure."""

    IS_DEFAULT: ClassVar[bool] = True
    """Whether it is computed if --eval_metric is not given."""

    HIGHER_IS_BETTER: ClassVar[bool] = True

    PACKAGE: ClassVar[str | None] = None
    """The package that it needs, by its name in requirements-evaluation.txt, which has its versions."""

    @abstractmethod
    def make_scorer(self) -> Scorer:
        """The function that gives one answer its figures; samples.jsonl shows them. Import the package here, not above.

        A measure of all answers together returns a scorer without figures, and overrides `total`.
        """

    def make_prompt_scorer(self) -> PromptScorer:
        """As `make_scorer`, for a measure that reads prompts."""
        score = self.make_scorer()
        return lambda prompt, reference, text: score(reference, text)

    def with_settings(self, train: TrainConfig) -> Measure:
        """This measure with settings of its own, if it has some."""
        return self

    def total(self, answers: Sequence[Answer]) -> dict[str, float]:
        """The figures in NAMES over all answers of all ranks, in the order of the data; by default their means.

        Every rank computes the same. There is at least one answer.
        """
        return {name: math.fsum(answer.figures[name] for answer in answers) / len(answers) for name in self.NAMES}

    def notes(self, references: Sequence[str]) -> list[str]:
        """Lines to print about references that this measures badly, before the run begins."""
        return []
