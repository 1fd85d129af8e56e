"""Losses that are no sum over tokens, such as those of whole answers, by the chunked head.

Such an objective is a function of the losses of all label tokens, and its gradient for each of them is known only after
the last chunk. A frozen head's gradient for one token's hidden state comes from that token's loss alone, so there it is
computed as for a sum, and multiplied by the token's weight when all losses are known. A head that trains is computed
twice: first without gradients, for the tokens' losses; then with gradients, each token's multiplied by its weight. That
costs one product with the head more. Neither holds more logits than a sum of cross-entropies does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from policies.loss.head_gradients import given_gradients, leaves_of, loss_with_gradients

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
    loss_of: Callable[..., torch.Tensor],
    objective: Objective,
    loss_grad: float | None,
) -> torch.Tensor:
    """What the objective makes of the tokens' losses, with its gradients if they are enabled.

    Args: as of `policies.loss.head_gradients.loss_with_gradients`.
        loss_of: a `policies.loss.summed_loss.CrossEntropy`.
    """
    if not torch.is_grad_enabled():
        return objective(token_losses(chunks, logits_of))
    # Gradients in fp16 need the loss scale and their weights before they are rounded.
    if hidden.requires_grad and hidden.dtype != torch.float16 and not _trains(logits_of, hidden):
        losses, gradient = _rows_of_frozen_head(chunks, logits_of, loss_of)
        loss, weights = _weighed(objective, losses)
        factors = weights if loss_grad is None else weights * loss_grad
        gradient = (gradient * factors.unsqueeze(-1)).to(gradient.dtype)
        return given_gradients(loss, loss_grad, [gradient], hidden)
    with torch.no_grad():
        losses = token_losses(chunks, logits_of)
    loss, weights = _weighed(objective, losses)
    by_chunk = iter(weights.split([len(targets) for _, targets in chunks]))

    def weighted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, targets, weights=next(by_chunk))

    total = loss_with_gradients(hidden, chunks, logits_of, weighted, loss_grad)
    return loss + (total - total.detach())  # exactly `loss`: the difference is 0


def _weighed(objective: Objective, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective's loss, and its gradient for each token's loss, fp32 [n]."""
    loss = objective(losses.requires_grad_())
    (weights,) = torch.autograd.grad(loss, losses)
    return loss.detach(), weights


def _trains(logits_of: LogitsOf, hidden: torch.Tensor) -> bool:
    """Whether the head trains anything: its graph for no token tells."""
    nothing = hidden[:, :0].detach().requires_grad_()
    return any(leaf is not nothing for leaf in leaves_of(logits_of(nothing.view_as(nothing))))


def _rows_of_frozen_head(
    chunks: Chunks, logits_of: LogitsOf, loss_of: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's loss, fp32 [n], and its gradient for the token's hidden state, [1, n, hidden_size]."""
    losses, gradients = list[torch.Tensor](), list[torch.Tensor]()
    for part, targets in chunks:
        inputs = part.detach().requires_grad_()
        # The gradient of a weighted sum for its weights is what they multiply: the losses.
        ones = torch.ones(len(targets), device=part.device, requires_grad=True)
        total = loss_of(logits_of(inputs.view_as(inputs)), targets, weights=ones)
        of_inputs, of_ones = torch.autograd.grad(total, [inputs, ones])
        gradients.append(of_inputs)
        losses.append(of_ones)
    return torch.cat(losses), torch.cat(gradients, dim=1)
