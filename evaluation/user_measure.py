"""A measure by a function of the user's: `--eval_metric my_metrics.py:score`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path

from data.dataset_functions.user_errors import RAISED
from evaluation.measure import Answer, Measure, PromptScorer, Scorer
from utils.errors import ConfigError, in_one_line
from utils.imported_files import import_file

FLAG = "--eval_metric"
OF_EVERY_EVALUATION = frozenset(
    ["event", "time", "step", "epoch", "loss", "eval_loss", "perplexity", "num_label_tokens", "num_pairs"]
)
OF_EVERY_SAMPLE = frozenset(["dataset", "row", "prompt", "reference", "generated"])
"""What the lines of metrics.jsonl and of samples.jsonl hold besides figures of answers."""


class UserMeasure(Measure):
    """`function(prompt, reference, answer)` returns a number, which has the function's name, or numbers by name.

    Higher is better. The figure of an evaluation is the mean over the answers that have it. Prompts are texts without
    special tokens.
    """

    NAMES = ()
    IS_DEFAULT = False

    def __init__(self, place: str, others: Collection[str]) -> None:
        """
        Args:
            place: "FILE.py:FUNCTION".
            others: the names of other measures' figures.

        Raises:
            ConfigError: if there is no such function.
        """
        file, _, name = place.rpartition(":")
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"{FLAG}: there is no file {file}; give FILE.py:FUNCTION")
        try:
            module = import_file(path)
        except RAISED as error:
            raise ConfigError(f"{FLAG}: {file} could not be imported ({_told(error)})") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigError(f"{FLAG}: {file} has no function {name}; name one as FILE.py:FUNCTION")
        self._place, self._name, self._function, self._others = place, name, function, frozenset(others)
        self._taken = self._others | OF_EVERY_EVALUATION | OF_EVERY_SAMPLE

    def make_scorer(self) -> Scorer:
        return partial(self._score, "")

    def make_prompt_scorer(self) -> PromptScorer:
        return self._score

    def _score(self, prompt: str, reference: str, text: str) -> Mapping[str, float]:
        try:
            found = self._function(prompt, reference, text)
        except RAISED as error:
            raise ConfigError(f"{FLAG}: {self._place} failed on an answer ({_told(error)}); mend it") from error
        figures = dict(found) if isinstance(found, Mapping) else {self._name: found}
        for name, value in figures.items():
            if not isinstance(name, str) or not _is_finite(value):
                raise ConfigError(
                    f"{FLAG}: {self._place} returned {value!r} for {name!r}; return a finite number, or a dict of them"
                )
            if name in self._taken:
                raise ConfigError(
                    f"{FLAG}: {name} of {self._place} is a figure of another measure, or a column of "
                    "metrics.jsonl or samples.jsonl; rename it"
                )
        return {name: float(value) for name, value in figures.items()}

    def total(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Means of whatever figures the function has returned."""
        found: dict[str, list[float]] = {}
        for answer in answers:
            for name, figure in answer.figures.items():
                if name not in self._others:
                    found.setdefault(name, []).append(figure)
        return {name: math.fsum(values) / len(values) for name, values in found.items()}


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number that is larger than any float
        return False


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"
