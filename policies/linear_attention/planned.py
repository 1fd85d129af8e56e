"""The memory of flash-linear-attention's kernels, for passes on the meta device: what they keep, and what they need.

Read off its autograd functions of version 0.6.0 (`fla/ops/kda/chunk.py`, `fla/modules/causal_conv1d/ops.py`). A chunk
that a document's end cuts short counts as full ones do, so the states of many short documents take a little more than
this. The gated delta rule is an operator, which says its own (policies/linear_attention/delta_rule_kernel.py).
"""

from __future__ import annotations

from typing import Any

import torch

from policies.linear_attention.delta_rule_kernel import CHUNK


def planned_kimi_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Kimi's rule without values.

    Args:
        query: [batch, seq, heads, key_dim], as is the key.
        value: [batch, seq, heads, value_dim].
        decay: [batch, seq, heads, key_dim].
        beta: [batch, seq, heads].

    Returns:
        [batch, seq, heads, value_dim].
    """
    output: torch.Tensor = _KimiRule.apply(query, key, value, decay, beta)
    return output


def planned_convolution(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A causal convolution with its activation, without values: `[batch, channels, seq]` to the same."""
    output: torch.Tensor = _Convolution.apply(hidden, weight)
    return output


def _like_keys(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A key for each of the value's heads."""
    return key.new_empty(*value.shape[:3], key.shape[-1])


def _states(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The state at each chunk's begin: [batch, chunks, heads, key_dim, value_dim]."""
    chunks = -(-value.shape[1] // CHUNK)
    return key.new_empty(value.shape[0], chunks, value.shape[2], key.shape[-1], value.shape[-1])


class _KimiRule(torch.autograd.Function):
    """`ChunkKDAFunction`: it keeps its decays, and two products of chunks."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, decay, beta = tensors
        # Normalized queries and keys, with the factors; slices of the convolution's output become tensors of their own.
        kept = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        kept += [tensor.new_empty(tensor.shape[:3], dtype=torch.float32) for tensor in (query, key)]
        kept += [torch.empty_like(decay, dtype=torch.float32), decay, beta]
        kept += [key.new_empty(*beta.shape, CHUNK) for _ in range(2)]
        ctx.save_for_backward(*kept)
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in tensors]
        output = torch.empty_like(kept[2])
        # Of keys, of values, of values less what the state predicted, and the states of all chunks.
        temporaries = _like_keys(key, value), torch.empty_like(output), torch.empty_like(output), _states(key, value)
        del temporaries
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key, value = ctx.saved_tensors[1:3]
        # All that forward had, computed again, with the gradients of it: they live until the function returns.
        temporaries = [_like_keys(key, value) for _ in range(5)] + [torch.empty_like(value) for _ in range(4)]
        temporaries += [_states(key, value), _states(key, value)]
        of_inputs = tuple(key.new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)
        temporaries.clear()
        return of_inputs


class _Convolution(torch.autograd.Function):
    """Keeps its input; the activation is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)
