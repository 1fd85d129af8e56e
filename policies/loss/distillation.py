"""How far a model is from a teacher whose most likely tokens are known."""

from __future__ import annotations

import torch

from data.tokens.labels import IGNORE_INDEX

_LEAST = 1e-6  # of the probability of all other tokens: its logarithm must be finite


def summed_divergence(
    logits: torch.Tensor,
    targets: torch.Tensor,
    teacher_ids: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the Kullback-Leibler divergence of teacher and model over label tokens: fp32 scalar.

    Over k + 1 outcomes: each of the teacher's k tokens, and all others together. So the model also learns how much is
    left for the others. It is at most the divergence over the whole vocabulary (Hinton et al., 2015, arXiv 1503.02531).

    Args:
        logits: [tokens, vocab], any floating dtype.
        targets: [tokens], -100 = no label.
        teacher_ids, teacher_logprobs: [tokens, k], natural logarithms.
        weights: [tokens], factors; None: 1.
    """
    numbers = logits.float()
    own = numbers.gather(1, teacher_ids) - numbers.logsumexp(-1, keepdim=True)
    wanted = teacher_logprobs.exp()
    rest_wanted = (1 - wanted.sum(-1)).clamp(min=_LEAST)
    rest = (1 - own.exp().sum(-1)).clamp(min=_LEAST)
    losses = (wanted * (teacher_logprobs - own)).sum(-1) + rest_wanted * (rest_wanted.log() - rest.log())
    factors = torch.where(targets == IGNORE_INDEX, 0.0, 1.0 if weights is None else weights)
    return (losses * factors).sum()
