"""Layers that are alike: the first of a kind runs, and outputs of its shapes stand in for those of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from policies.activations.offloading import own_input


def kind_of(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """A key that is equal for layers that keep equally many bytes.

    Strings and booleans of modules are part of it: one layer has a sliding window, one leaves its keys to later layers
    (Gemma 4).
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    settings = (item for module in layer.modules() for item in vars(module).items())
    return (
        type(layer),
        tuple((name, value) for name, value in settings if isinstance(value, bool | str)),
        tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()),
        tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors),
    )


@dataclass(frozen=True)
class _Shape:
    """A tensor without its values and its graph."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


def shapes_of(outputs: Any) -> Any:
    """The outputs of a layer, each tensor replaced by its shape: their graph would live as long as they do."""
    return tree_map_only(torch.Tensor, lambda tensor: _Shape(tensor.shape, tensor.dtype, tensor.requires_grad), outputs)


def stand_in(args: Any, kwargs: Any, shapes: Any) -> Any:
    """Outputs of the shapes that `shapes_of` gave, through which gradients reach the layer's input."""
    hidden = own_input(args, kwargs)

    def make(found: _Shape) -> torch.Tensor:
        if found.requires_grad and hidden is not None and hidden.requires_grad:
            output: torch.Tensor = _StandIn.apply(hidden, found.shape, found.dtype)
            return output
        return torch.empty(found.shape, dtype=found.dtype, device="meta")

    return tree_map_only(_Shape, make, shapes)


class _StandIn(torch.autograd.Function):
    """An output without computation: backward gives its input a gradient without values."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        ctx.of_input = (hidden.shape, hidden.dtype)
        return hidden.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shape, dtype = ctx.of_input
        return grad.new_empty(shape, dtype=dtype), None, None
