"""FLOPs of causal attention in sequences end to end, for operators of ours that torch does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count


def flops_of_sequences(
    flops: Callable[..., int],
    query: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> int:
    """FLOPs of causal attention of all, or of each sequence. Grouped heads cost what all heads would.

    Half of what torch counts without causality is left out (reporting/flop_counter.py), of queries and their own keys.

    Args:
        flops: of attention without causality, by the shapes [batch, heads, seq, head_dim] of queries, keys and values.
    """
    if cu_seqlens is None or cu_seqlens_k is None:
        batch, length, heads, size = query.shape
        sequences = [(batch, length, length)]
    else:
        _, heads, size = query.shape
        sequences = [(1, *of) for of in zip(cu_seqlens.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)]
    total = 0
    for batch, queries, keys in sequences:
        own, seen = (batch, heads, queries, size), (batch, heads, keys, size)
        total += flops(own, seen, seen) - flops(own, own, own) // 2
    return total


def backward_flop_count(query: Any, key: Any, value: Any) -> int:
    """FLOPs of attention's backward without causality, by the shapes of forward."""
    return sdpa_backward_flop_count(query, query, key, value)
