"""Which measures of the model's answers there are, and the figures of an evaluation by all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.training import TrainConfig
from evaluation.measure import Answer, Measure
from evaluation.rouge import Rouge
from tasks.task import Task
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


def deciding_figure(figures: Mapping[str, float], best_metric: str, task: Task) -> float | None:
    """The figure that --best_metric names, such that higher is better; None if the loss decides.

    Args:
        figures: of an evaluation: of the answers, and the task's own.
    """
    if best_metric not in figures:
        return None
    of_answers = {name: each.HIGHER_IS_BETTER for each in MEASURES for name in each.NAMES}
    return figures[best_metric] if {**of_answers, **task.EVAL_FIGURES}[best_metric] else -figures[best_metric]


def check_best_metric(train: TrainConfig, task: Task) -> None:
    """Check that --best_metric names a figure of this task's evaluations.

    Raises:
        ConfigError: if not.
    """
    of_answers = [name for each in MEASURES for name in each.NAMES]
    if train.best_metric in of_answers and not train.eval_generate:
        raise ConfigError(f"--best_metric: {train.best_metric} needs --eval_generate; add it, or leave this out")
    names = (EVAL_LOSS, *task.EVAL_FIGURES, *of_answers)
    if train.best_metric not in names:
        raise ConfigError(f"--best_metric: {train.best_metric!r} is not one of {', '.join(names)}; give one of these")


def check_measures(train: TrainConfig) -> None:
    """Check that the packages of --eval_generate are installed.

    Raises:
        ConfigError: if not; with the command that installs them.
    """
    if train.eval_generate:
        for package in filter(None, (each.PACKAGE for each in MEASURES)):
            check_installed("--eval_generate", package)
