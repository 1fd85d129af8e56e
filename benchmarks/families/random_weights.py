"""Weights of tiny models as large as trained ones."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def set_weights(model: Any) -> None:
    """Random weights for which every part of the model matters, always the same.

    New models have near-uniform attention, and biases of zero, also in their routers: a part that a run leaves out, or
    a document that sees another one, would hardly change a loss.
    """
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dim() > 1 and isinstance(tensor, torch.nn.Parameter):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
