"""Losses of preferences: pure functions of the log-probabilities of whole answers, one loss for each pair.

All return fp32 [pairs]. An answer's log-probability is the sum over its label tokens; its mean log-probability
is that divided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from configs.preference import LossType, PreferenceConfig


class Preferences(NamedTuple):
    """What a loss says of pairs."""

    losses: torch.Tensor  # fp32 [pairs]
    rewards: torch.Tensor  # fp32 [pairs, 2], of chosen and rejected answers: by how much each is preferred


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of --loss_type, with its settings."""

    kind: LossType
    settings: PreferenceConfig

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared with their log-probabilities before training."""
        return self.kind == "dpo"

    def of(self, scores: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor) -> Preferences:
        """The losses and rewards of pairs.

        Args:
            scores: log-probabilities of answers, fp32 [pairs, 2], the chosen one's first.
            lengths: their label tokens, fp32 [pairs, 2].
            reference: their log-probabilities before training, fp32 [pairs, 2].
        """
        settings, smoothing = self.settings, self.settings.preference_smoothing
        beta = settings.beta_of(self.kind)
        if self.kind == "dpo":
            losses = dpo_losses(scores, reference, beta=beta, smoothing=smoothing)
            return Preferences(losses, beta * (scores - reference))
        if self.kind == "orpo":
            means = scores / lengths
            return Preferences(orpo_losses(means, weight=settings.orpo_weight), settings.orpo_weight * means)
        scores = scores / lengths if settings.length_normalized else scores
        losses = simpo_losses(scores, beta=beta, gamma=settings.simpo_gamma, smoothing=smoothing)
        return Preferences(losses, beta * scores)


def dpo_losses(scores: torch.Tensor, reference: torch.Tensor, *, beta: float, smoothing: float = 0.0) -> torch.Tensor:
    """Direct preference optimization (Rafailov et al., 2023, arXiv 2305.18290, equation 7).

    Args:
        scores: log-probabilities of the answers, [pairs, 2], the chosen one's first.
        reference: the same of the model before training.
        beta: how much a change of the log-probabilities counts.
        smoothing: the share of pairs whose preference is taken to be the wrong way round (Mitchell, "A note on DPO with
            noisy preferences", 2023).
    """
    chosen, rejected = (scores - reference).unbind(1)
    return _smoothed(beta * (chosen - rejected), smoothing)


def simpo_losses(scores: torch.Tensor, *, beta: float, gamma: float, smoothing: float = 0.0) -> torch.Tensor:
    """Simple preference optimization, without a reference (Meng et al., 2024, arXiv 2405.14734, equation 6).

    Args:
        scores: mean log-probabilities of the answers, [pairs, 2], the chosen one's first.
        gamma: the margin of beta times these that is aimed at.
        smoothing: as of `dpo_losses`.
    """
    chosen, rejected = scores.unbind(1)
    return _smoothed(beta * (chosen - rejected) - gamma, smoothing)


def orpo_losses(means: torch.Tensor, *, weight: float) -> torch.Tensor:
    """Odds ratio preference optimization (Hong et al., 2024, arXiv 2403.07691, equations 6 and 7).

    The cross-entropy of the chosen answer, a mean over its tokens, and `weight` times -log sigmoid of the log odds
    ratio.

    Args:
        means: mean log-probabilities of the answers, [pairs, 2], the chosen one's first.
    """
    log_odds = means - _log_of_rest(means)
    log_odds_ratio = log_odds[:, 0] - log_odds[:, 1]
    return -means[:, 0] - weight * F.logsigmoid(log_odds_ratio)


def _smoothed(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _log_of_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """log(1 - p) of a log-probability; finite if p rounds to 1."""
    smallest = torch.finfo(log_probability.dtype).eps
    return torch.log(-torch.expm1(log_probability.clamp(max=-smallest)))
