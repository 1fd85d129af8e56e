"""Keys and values for attention in which sequences begin with tokens of others (`tasks.shared_keys`).

A token has its own key and at most one copy of it. So the gradient is a sum of two, in one order and without atomics:
that of torch's `index_select` adds in any order on GPUs.

Forward and backward are operators, not autograd functions, for the reason in
policies/quantization/quantized_linear.py.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("shared_prompts::copy_keys", mutates_args=())
def copy_keys(tokens: torch.Tensor, places: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """The keys, or values, of all sequences end to end, [keys, heads, head_dim].

    Args:
        tokens: one of each token, [tokens, heads, head_dim].
        places: the token of each key, int64 [keys].
        copies: the key of each token, and its copy or -1, int64 [2, tokens].
    """
    return tokens.index_select(0, places)


@copy_keys.register_fake
def _(tokens: torch.Tensor, places: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(places.shape[0], *tokens.shape[1:])


@torch.library.custom_op("shared_prompts::copy_keys_backward", mutates_args=())
def copy_keys_backward(grad: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """The gradient of the tokens, [tokens, heads, head_dim]."""
    own, other = copies
    of_copies = grad.index_select(0, other.clamp(min=0)).masked_fill_((other < 0)[:, None, None], 0)
    return grad.index_select(0, own).add_(of_copies)


@copy_keys_backward.register_fake
def _(grad: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(copies.shape[1], *grad.shape[1:])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return copy_keys_backward(grad, *ctx.saved_tensors), None, None


copy_keys.register_autograd(_backward, setup_context=_keep)
