"""Attention with sinks, as gpt-oss has it: a learned score of each head beside those of the keys, without a value.

A sink takes part of the softmax and adds nothing (Xiao et al., "Efficient streaming language models with attention
sinks", 2023; OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025). If L is the logarithm of a query's sum of
exp(score), and s the sink, the sum becomes exp(L') = exp(L) + exp(s), so

    output' = output x exp(L - L')
    gradient of s = - sum over queries of exp(s - L') x (grad . output')

Flash attention's backward takes the output and L of forward. It computes a key's probability as exp(score - L), and the
gradient of its score as probability x (grad . value - grad . output). Given output' and L' instead, it computes what
attention with a sink needs, exactly: so the kernels stay as they are, and nothing more is kept.

Forward and backward are operators, not autograd functions, for the reason in
policies/quantization/quantized_linear.py. Their name tells selective checkpointing that they are an attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from policies.attention.each_sequence import flash_backward, flash_forward
from policies.attention.flash_attention_4 import NO_WINDOW
from policies.attention.sequence_flops import backward_flop_count, flops_of_sequences

_aten = torch.ops.aten


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    of_keys: tuple[torch.Tensor, int] | None = None,
    *,
    scale: float | None = None,
    window: int = NO_WINDOW,
) -> torch.Tensor:
    """Causal attention inside sequences, on GPUs by torch's flash kernels, on CPUs for each sequence by itself.

    Args:
        query: [tokens, heads, head_dim]; key and value may have fewer heads.
        sinks: [heads].
        cu_seqlens: int32 [sequences + 1], where each sequence begins, and where the last ends.
        max_length: tokens of the longest sequence.
        of_keys: the same two of keys and values, if sequences have more of them: the last query is at the last key.
        window: how many tokens before its own a query sees.

    Returns:
        As the query.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    cu_seqlens_k, max_length_k = of_keys or (cu_seqlens, max_length)
    offsets = (cu_seqlens, cu_seqlens_k, max_length, max_length_k)
    output: torch.Tensor = attend(query, key, value, sinks, *offsets, scale, window)[0]
    return output


@torch.library.custom_op("varlen_attn_with_sinks::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_length: int,
    max_length_k: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and fp32 [heads, tokens]: the logarithm of each query's sum, both with the sinks."""
    if query.is_cpu:
        output, log_sums = flash_forward(query, key, value, cu_seqlens, cu_seqlens_k, scale, window)
    else:
        sequences = (cu_seqlens, cu_seqlens_k, max_length, max_length_k)
        output, log_sums, *_ = _aten._flash_attention_forward(
            query, key, value, *sequences, 0.0, window == NO_WINDOW, False, **_options(scale, window)
        )
    with_sinks = torch.logaddexp(log_sums, sinks.to(log_sums.dtype)[:, None])
    output.mul_((log_sums - with_sinks).exp_().T[..., None])
    return output, with_sinks


@attend.register_fake
def _(query: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)


@torch.library.custom_op("varlen_attn_with_sinks::attend_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_length: int,
    max_length_k: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    heads = (query, key, value, output, log_sums)
    if query.is_cpu:
        return flash_backward(grad, *heads, cu_seqlens, cu_seqlens_k, scale, window)
    sequences = (cu_seqlens, cu_seqlens_k, max_length, max_length_k)
    # For dropout, which there is none of: the state of its random numbers, and an unused one.
    random = (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device))
    of_query, of_key, of_value = _aten._flash_attention_backward(
        grad, *heads, *sequences, 0.0, window == NO_WINDOW, *random, **_options(scale, window)
    )
    return of_query, of_key, of_value


@attend_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _options(scale: float, window: int) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window, "window_size_right": 0}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, sinks, cu_seqlens, cu_seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, sinks, cu_seqlens, cu_seqlens_k)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *heads, sinks, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    output, log_sums = heads[3:]
    of_heads = attend_backward(grad, *heads, cu_seqlens, cu_seqlens_k, *ctx.options)
    of_sinks = gradient_of_sinks(grad, output, log_sums, sinks) if ctx.needs_input_grad[3] else None
    return *of_heads, of_sinks, *[None] * 6


attend.register_autograd(_backward, setup_context=_keep)


def gradient_of_sinks(
    grad: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sinks, [heads].

    Args:
        grad: of the output, [tokens, heads, head_dim].
        log_sums: [heads, tokens], with the sinks.
    """
    shares = (sinks.to(log_sums.dtype)[:, None] - log_sums).exp()
    # One fp32 tensor, no larger than those that the kernel needed.
    products = grad.to(log_sums.dtype, copy=True).mul_(output).sum(-1)
    return -(shares * products.T).sum(1).to(sinks.dtype)


@register_flop_formula(torch.ops.varlen_attn_with_sinks.attend, get_raw=True)
def _(query: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return flops_of_sequences(sdpa_flop_count, query, args[3], args[4])


@register_flop_formula(torch.ops.varlen_attn_with_sinks.attend_backward, get_raw=True)
def _(grad: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return flops_of_sequences(backward_flop_count, grad, args[5], args[6])
