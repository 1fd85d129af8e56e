"""The memory of the compiled cross-entropy: a chunk of logits, and their gradient.

Uncompiled, it holds copies in fp32: 10 bytes for each logit in bf16 while it computes, and 12 in its backward pass.
Compiled, it reads logits and writes their gradient in their own dtype, once each: 2 and 4 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def compiled_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    by_probability: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`policies.loss.summed_loss.summed_cross_entropy` on the meta device, as large as compiled: fp32 scalar.

    Args:
        logits: [tokens, vocab].
    """
    loss: torch.Tensor = _ReadAndWrittenOnce.apply(logits, by_probability, weights)
    return loss


class _ReadAndWrittenOnce(torch.autograd.Function):
    """Besides its logits, one to three numbers of each row are kept (policies/loss/compiled_cross_entropy.py)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, by_probability: bool, weights: torch.Tensor | None) -> torch.Tensor:
        num_kept = 1 + by_probability + ctx.needs_input_grad[2]
        of_rows = logits.new_empty(len(logits), num_kept, dtype=torch.float32)
        ctx.save_for_backward(logits, of_rows)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        logits, of_rows = ctx.saved_tensors
        return torch.empty_like(logits), None, of_rows.new_empty(len(logits)) if ctx.needs_input_grad[2] else None
