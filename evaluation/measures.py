"""Which measures of the model's answers there are, and the figures of an evaluation by all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.training import TrainConfig
from evaluation.measure import Answer, Measure
from evaluation.rouge import Rouge
from utils.errors import ConfigError
from utils.optional_packages import check_installed

MEASURES: Sequence[Measure] = [
    Rouge(),
]

EVAL_LOSS = "eval_loss"  # the figure of --best_metric that needs no answers


def measure(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures of all measures by name; none without answers.

    Args:
        answers: of all ranks, as `evaluation.generation.Generation.answers` returns them.
    """
    return {name: figure for each in MEASURES if answers for name, figure in each.total(answers).items()}


def deciding_figure(figures: Mapping[str, float], best_metric: str) -> float | None:
    """The figure that --best_metric names, such that higher is better; None if the loss decides."""
    found = next((each for each in MEASURES if best_metric in each.NAMES), None)
    if found is None or best_metric not in figures:
        return None
    return figures[best_metric] if found.HIGHER_IS_BETTER else -figures[best_metric]


def check_measures(train: TrainConfig) -> None:
    """Check that --best_metric names a figure, and that the packages of --eval_generate are installed.

    Raises:
        ConfigError: if not; with the command that installs them.
    """
    names = (EVAL_LOSS, *(name for each in MEASURES for name in each.NAMES))
    if train.best_metric not in names:
        raise ConfigError(f"--best_metric: {train.best_metric!r} is not one of {', '.join(names)}; give one of these")
    if train.eval_generate:
        for package in filter(None, (each.PACKAGE for each in MEASURES)):
            check_installed("--eval_generate", package)
