"""Tiny models with weights as large as trained ones."""

from __future__ import annotations

import copy
from typing import Any

import torch


def make_random_model(auto_model: Any, config: Any, **options: Any) -> Any:
    """The model of an auto class in fp32, for evaluation. Every part of it matters, and it is always the same.

    New models have near-uniform attention, and biases of zero, also in their routers: a part that a run leaves out, or
    a document that sees another one, would hardly change a loss.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # vectors keep what their family draws, such as a delta rule's decays
        model = auto_model.from_config(copy.deepcopy(config), dtype=torch.float32, **options)
    _scale_weights(model)
    return model.eval()


@torch.no_grad()
def _scale_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dim() > 1 and isinstance(tensor, torch.nn.Parameter):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
