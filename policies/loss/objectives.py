"""Losses that are no sum over tokens, such as those of whole answers, by the chunked head.

Such an objective is a function of the losses of all label tokens, and its gradient for each of them is known only after
the last chunk. So the head is computed twice: first without gradients, for the tokens' losses, of which the objective
makes the loss and a weight of each token; then with gradients, each token's multiplied by its weight. That costs one
product with the head more than a sum of cross-entropies does, and holds no more logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from policies.loss.head_gradients import loss_with_gradients

Objective = Callable[[torch.Tensor], torch.Tensor]
"""Makes a loss, fp32 scalar, of the cross-entropy of each label token, fp32 [n]; without gradients any figures."""

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
Chunks = Sequence[tuple[torch.Tensor, torch.Tensor]]


def token_losses(chunks: Chunks, logits_of: LogitsOf) -> torch.Tensor:
    """The cross-entropy of each target, fp32 [n], chunk by chunk.

    Args: as of `policies.loss.head_gradients.loss_with_gradients`.
    """
    return torch.cat([F.cross_entropy(logits_of(h).float(), t, reduction="none") for h, t in chunks])


def loss_by_objective(
    hidden: torch.Tensor,
    chunks: Chunks,
    logits_of: LogitsOf,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    objective: Objective,
    loss_grad: float | None,
) -> torch.Tensor:
    """What the objective makes of the tokens' losses, with its gradients if they are enabled.

    Args: as of `policies.loss.head_gradients.loss_with_gradients`.
    """
    with torch.no_grad():
        losses = token_losses(chunks, logits_of)
    if not torch.is_grad_enabled():
        return objective(losses)
    loss = objective(losses.requires_grad_())
    (weights,) = torch.autograd.grad(loss, losses)
    by_chunk = iter(weights.split([len(targets) for _, targets in chunks]))

    def weighted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = _WithScaledGradient.apply(logits, next(by_chunk))
        return loss_of(scaled, targets)

    total = loss_with_gradients(hidden, chunks, logits_of, weighted, loss_grad)
    return loss.detach() + (total - total.detach())  # exactly `loss`: the difference is 0


class _WithScaledGradient(torch.autograd.Function):
    """Logits as they are; the gradient of each row is multiplied by the row's weight."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weights,) = ctx.saved_tensors
        return (grad * weights.unsqueeze(1)).to(grad.dtype), None
