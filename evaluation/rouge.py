"""ROUGE: what two texts share of words and word sequences (Lin, "ROUGE", 2004), by the package rouge-score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from configs.training import TrainConfig
from utils.errors import ConfigError
from utils.optional_packages import is_installed

ROUGES = ("rouge1", "rouge2", "rougeL")
"""Single words, pairs of words, and the longest common sequence of words."""
REQUIREMENT = "rouge-score>=0.1.2,<0.2"
"""As in requirements-evaluation.txt."""


def check_package(train: TrainConfig) -> None:
    """Refuse --eval_generate if its package is not installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    if train.eval_generate and not is_installed(REQUIREMENT.partition(">")[0]):
        raise ConfigError(f"--eval_generate: needs the package rouge-score; pip install '{REQUIREMENT}'")


def rouge_scorer() -> Callable[[str, str], dict[str, float]]:
    """A function of reference and text that gives the F-measure of each of ROUGES, 0 to 100, of stemmed words."""
    from rouge_score.rouge_scorer import RougeScorer  # optional

    scorer: Any = RougeScorer(list(ROUGES), use_stemmer=True)

    def score(reference: str, text: str) -> dict[str, float]:
        return {name: 100 * value.fmeasure for name, value in scorer.score(reference, text).items()}

    return score
