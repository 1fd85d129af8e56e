"""All-to-all around attention (DeepSpeed-Ulysses, Jacobs et al., 2023): heads are exchanged for tokens, and back.

Between layers each rank holds all heads of its tokens; in attention, all tokens of its heads. So attention computes
whole rows, as on one rank: windows, sinks and the offsets of packed documents stay what they are.

The exchange is an operator, not an autograd function, for the reason in policies/quantization/quantized_linear.py. Its
backward is the same exchange. Layers that are recomputed exchange again, on all ranks in step.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from utils.torch_internals import group_named


@torch.library.custom_op("context_parallel::all_to_all", mutates_args=())
def all_to_all(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Sends `parts[i]` to the i-th rank of the group, and returns what the i-th sent as [i].

    Args:
        parts: [ranks, ...], contiguous, of one shape on all ranks.
        group: name of a process group.
    """
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group_named(group))
    return received


@all_to_all.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(parts)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return all_to_all(grad.contiguous(), ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_keep)


def repeats_of_keys(num_key_heads: int, num_ranks: int) -> int:
    """How often each key head is repeated, so that every rank gets as many, beside the query heads that use them."""
    return num_ranks // gcd(num_key_heads, num_ranks)


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_ranks: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of this rank's heads, from all heads of its tokens. One exchange for all three.

    Args:
        query: [batch, heads, seq / ranks, head_dim]; key and value may have fewer heads, of the same width.

    Returns:
        The same, [batch, heads / ranks, seq, head_dim], views of one tensor.
    """
    times = repeats_of_keys(key.shape[1], num_ranks)
    if times > 1:  # autograd adds up the gradients of the copies
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    # [ranks, batch, seq / ranks, heads / ranks, head_dim] of each
    parts = [tensor.unflatten(1, (num_ranks, -1)).permute(1, 0, 3, 2, 4) for tensor in (query, key, value)]
    received = all_to_all(torch.cat(parts, 3), group)
    rows = received.transpose(0, 1).flatten(1, 2)
    whole = [tensor.transpose(1, 2) for tensor in rows.split([part.shape[3] for part in parts], 2)]
    return whole[0], whole[1], whole[2]


def to_tokens(output: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """All heads of this rank's tokens, [batch, seq / ranks, heads, head_dim].

    Args:
        output: all tokens of this rank's heads, [batch, seq, heads / ranks, head_dim].
    """
    parts = output.unflatten(1, (num_ranks, -1)).transpose(0, 1)
    received = all_to_all(parts.contiguous(), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
