"""The summed cross-entropy in the form that torch.compile makes the fastest kernels of.

Of `torch.nn.functional.cross_entropy` inductor makes a backward kernel that sums the gradient of each row's
log-softmax, of which one element is not zero, before it reads the logits. Here the gradient is written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from data.tokens.labels import IGNORE_INDEX
from policies.compilation.layers import EagerFallback, compile_for_any_rows
from policies.loss.summed_loss import CrossEntropy, summed_cross_entropy


def compile_cross_entropy(fallback: EagerFallback | None = None) -> CrossEntropy:
    """`policies.loss.summed_loss.summed_cross_entropy`, compiled once for any number of tokens.

    Args:
        fallback: if it does not compile; None: torch's error ends the call.
    """
    return compile_for_any_rows(_summed_cross_entropy, written=summed_cross_entropy, fallback=fallback)


def _summed_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    by_probability: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    loss: torch.Tensor = _CrossEntropy.apply(logits, targets, label_smoothing, by_probability, weights)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        label_smoothing: float,
        by_probability: bool,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        numbers = logits.float()
        normalizers = numbers.logsumexp(-1)
        ctx.label_smoothing = label_smoothing
        # -100 is no index; rows without a label are zeroed below.
        wanted = numbers.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
        if label_smoothing:
            wanted = (1 - label_smoothing) * wanted + label_smoothing * numbers.mean(-1)
        losses = torch.where(targets == IGNORE_INDEX, 0.0, normalizers - wanted)
        factors = torch.where(targets == IGNORE_INDEX, 0.0, (-losses).exp() if by_probability else 1.0)
        losses = losses * factors
        factors = factors if weights is None else factors * weights
        ctx.save_for_backward(logits, targets, normalizers, factors, losses)
        return (losses if weights is None else losses * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, normalizers, factors, losses = ctx.saved_tensors
        vocab = logits.shape[-1]
        is_target = torch.arange(vocab, device=logits.device) == targets.unsqueeze(1)
        wanted = is_target * (1 - ctx.label_smoothing) + ctx.label_smoothing / vocab
        of_loss = (logits.float() - normalizers.unsqueeze(1)).exp() - wanted
        of_logits = (of_loss * (factors * grad).unsqueeze(1)).to(logits.dtype)
        return of_logits, None, None, None, losses * grad if ctx.needs_input_grad[4] else None
