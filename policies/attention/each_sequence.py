"""Attention on CPUs, which have no kernel for packed rows: each sequence by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_of_each_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    **options: Any,
) -> torch.Tensor:
    """Attention like `varlen_attn`, for CPUs, which have no such kernel.

    Args:
        query: [tokens, heads, head_dim]; key and value may have fewer heads.
        cu_seq_q, cu_seq_k: int32 [sequences + 1], in host memory. The last query of a sequence is at its last key.
        window_size: how many tokens before its own a query sees, and how many after it, 0 or all; -1: all.

    Returns:
        [tokens, heads, head_dim].
    """
    outputs, is_causal = [], window_size[1] == 0
    for queries, keys, values in _sequences((query, key, value), (cu_seq_q, cu_seq_k, cu_seq_k)):
        mask = _causal_mask(queries, keys, window_size[0]) if is_causal else None
        output = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the logarithm of each query's sum: fp32 [heads, tokens]."""
    key, value = (_for_all_heads(tensor, query) for tensor in (key, value))
    output, log_sums = torch.empty_like(query), []
    written = output.split(cu_seqlens.diff().tolist())
    offsets = (cu_seqlens, cu_seqlens_k, cu_seqlens_k)
    for heads, place in zip(_sequences((query, key, value), offsets), written, strict=True):
        found, sums = _FORWARD(*heads, 0.0, scale=scale, **_mask_options(heads[0], heads[1], window))
        place.copy_(found[0].transpose(0, 1))
        log_sums.append(sums[0])
    return output, torch.cat(log_sums, 1)


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    all_keys, all_values = (_for_all_heads(tensor, query) for tensor in (key, value))
    tensors = (grad.contiguous(), query, all_keys, all_values, output, log_sums.T)
    offsets, found = [cu_seqlens_k if tensor in (2, 3) else cu_seqlens for tensor in range(len(tensors))], []
    for *heads, sums in _sequences(tensors, offsets):
        options = _mask_options(heads[1], heads[2], window)
        found.append(_BACKWARD(*heads, sums, 0.0, options.pop("is_causal"), scale=scale, **options))
    of_query, of_key, of_value = (torch.cat([part[0] for part in parts], 1) for parts in zip(*found, strict=True))
    return _as(query, of_query), _as(key, of_key), _as(value, of_value)


def _sequences(tensors: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Of each sequence the part of tensors [tokens, heads, ...], as [1, heads, tokens, ...].

    Args:
        offsets: of each tensor, where sequences begin in it, and where the last ends.
    """
    split = [tensor.split(of.diff().tolist()) for tensor, of in zip(tensors, offsets, strict=True)]
    for parts in zip(*split, strict=True):
        yield [part.transpose(0, 1)[None] for part in parts]


def _causal_mask(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor | None:
    """Which keys a query sees, bool [queries, keys]; None if torch's causal kernel, which is faster, knows it."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_cut, before = 0 <= window < num_keys - 1, num_keys - num_queries
    if before == 0 and not is_cut:
        return None
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(before)
    return visible.triu(before - window) if is_cut else visible


def _mask_options(query: torch.Tensor, key: torch.Tensor, window: int) -> dict[str, Any]:
    visible = _causal_mask(query, key, window)
    if visible is None:
        return {"is_causal": True}
    return {"is_causal": False, "attn_mask": query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)}


def _for_all_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values for each query head: kernels of some versions of torch take no fewer."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _as(like: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor [tokens, heads, head_dim] from one [all heads, tokens, head_dim]."""
    return torch.empty_like(like).copy_(grad.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1))
