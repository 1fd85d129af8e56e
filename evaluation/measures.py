"""Which measures of the model's answers there are, and the figures of an evaluation by all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from configs.training import TrainConfig
from evaluation.choice import LikeliestAnswer
from evaluation.chrf import ChrF
from evaluation.exact_match import ExactMatch
from evaluation.json_answers import JsonAnswers
from evaluation.measure import Answer, Measure
from evaluation.rouge import Rouge
from evaluation.user_measure import UserMeasure
from tasks.task import Task
from utils.errors import ConfigError
from utils.optional_packages import check_installed

MEASURES: Sequence[Measure] = [
    Rouge(),
    ExactMatch(),
    LikeliestAnswer(),
    ChrF(),
    JsonAnswers(),
]

_OF_USER = re.compile(r".+\.py:\w+")

EVAL_LOSS = "eval_loss"  # the figure of --best_metric that needs no answers


def measures_of(train: TrainConfig) -> tuple[Measure, ...]:
    """The measures that --eval_metric names, or those that are computed without it; none without --eval_generate.

    Raises:
        ConfigError: if there is no such measure.
    """
    if not train.eval_generate:
        return ()
    by_name = {each.NAME or each.NAMES[0]: each for each in MEASURES}
    if not train.eval_metric:
        return tuple(each for each in MEASURES if each.IS_DEFAULT)
    return tuple(_find(asked, by_name).with_settings(train) for asked in dict.fromkeys(train.eval_metric))


def _find(asked: str, by_name: Mapping[str, Measure]) -> Measure:
    if _OF_USER.fullmatch(asked):
        return UserMeasure(asked, _names(MEASURES))
    if asked not in by_name:
        raise ConfigError(
            f"--eval_metric: {asked!r} is neither one of {', '.join(by_name)} nor FILE.py:FUNCTION; give one of these"
        )
    return by_name[asked]


def _names(measures: Iterable[Measure]) -> list[str]:
    return [name for each in measures for name in each.NAMES]


def measure(answers: Sequence[Answer], measures: Sequence[Measure]) -> dict[str, float]:
    """The figures of these measures by name; none without answers.

    Args:
        answers: of all ranks, as `evaluation.generation.Generation.answers` returns them.
    """
    return {name: figure for each in measures if answers for name, figure in each.total(answers).items()}


def deciding_figure(figures: Mapping[str, float], best_metric: str, task: Task) -> float | None:
    """The figure that --best_metric names, such that higher is better; None if the loss decides.

    It is minus infinity if this evaluation lacks it, as a correlation of equal numbers.

    Args:
        figures: of an evaluation: of the answers, and the task's own.
    """
    if best_metric == EVAL_LOSS:
        return None
    if best_metric not in figures:
        return -math.inf
    of_answers = {name: each.HIGHER_IS_BETTER for each in MEASURES for name in each.NAMES}
    # Higher is better for figures of a user's function, which are listed nowhere.
    higher = {**of_answers, **task.EVAL_FIGURES}.get(best_metric, True)
    return figures[best_metric] if higher else -figures[best_metric]


def check_best_metric(train: TrainConfig, task: Task) -> None:
    """Check that --best_metric names a figure of this task's evaluations.

    Raises:
        ConfigError: if not.
    """
    of_answers = _names(MEASURES)
    if train.best_metric in of_answers and not train.eval_generate:
        raise ConfigError(f"--best_metric: {train.best_metric} needs --eval_generate; add it, or leave this out")
    measures = measures_of(train)
    names = (EVAL_LOSS, *task.EVAL_FIGURES, *_names(measures or MEASURES))
    if train.best_metric in of_answers and train.best_metric not in names:
        raise ConfigError(f"--best_metric: {train.best_metric} is not a figure of --eval_metric; add its measure there")
    # What a user's function returns is seen when the first answers are planned (`check_figures`).
    if train.best_metric not in names and not any(isinstance(each, UserMeasure) for each in measures):
        raise ConfigError(f"--best_metric: {train.best_metric!r} is not one of {', '.join(names)}; give one of these")


def check_measures(train: TrainConfig) -> None:
    """Check that the packages of --eval_generate are installed.

    Raises:
        ConfigError: if not; with the command that installs them.
    """
    for package in filter(None, (each.PACKAGE for each in measures_of(train))):
        check_installed("--eval_metric" if train.eval_metric else "--eval_generate", package)


def check_figures(train: TrainConfig, task: Task, found: Iterable[str]) -> None:
    """Check that figures have different names, and --best_metric one of them, once those of a first answer are known.

    Raises:
        ConfigError: if not.
    """
    found = list(found)
    if twice := [name for place, name in enumerate(found) if name in (*task.EVAL_FIGURES, *found[:place])]:
        raise ConfigError(f"--eval_metric: {twice[0]} is the name of two figures; rename one of your function")
    names = dict.fromkeys([EVAL_LOSS, *task.EVAL_FIGURES, *found])
    if train.best_metric not in names:
        raise ConfigError(f"--best_metric: {train.best_metric!r} is not one of {', '.join(names)}; give one of these")
