"""Unpacking nf4 weights by our own kernel, to the bits that bitsandbytes gives."""

from __future__ import annotations

from typing import Any

import torch

# An operator: backward of the products of packed weights is traced when it is compiled, and calls this.


@torch.library.custom_op("quantization::unpack_nf4", mutates_args=())
def unpack_nf4(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested: list[torch.Tensor],
    block: int,
    nested_block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Unpack 4-bit matrices: each weight is the value of its code times the scale of its block, rounded once to
    `dtype`. No scale is written to memory.

    Args:
        packed: uint8 [bytes, 1], the first of two weights in the upper half of a byte.
        absmax: [matrices, scales], at least as many as a matrix has blocks; fp32, or uint8 if they are nested.
        code: fp32 [16], the values.
        nested: what decodes the scales of double quantization, all fp32: an offset for each matrix, the scales of
            `nested_block` scales each, and the 256 values of their codes; empty without it.
        block: weights per scale.

    Returns:
        [2 * bytes]
    """
    weights = packed.new_empty(2 * packed.numel(), dtype=dtype)
    if packed.is_cuda:
        from policies.quantization.nf4_kernel import unpack_into  # needs Triton

        unpack_into(weights, packed, absmax, code, nested, block, nested_block)
        return weights
    if nested:
        offset, nested_absmax, nested_code = nested
        of_nested = nested_absmax.flatten().repeat_interleave(nested_block)[: absmax.numel()].view(absmax.shape)
        absmax = nested_code[absmax.int()] * of_nested + offset.view(-1, 1)
    halves = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten().long()
    blocks_of_matrix = -(-halves.numel() // block) // len(absmax)
    scales = absmax[:, :blocks_of_matrix].flatten().repeat_interleave(block)[: halves.numel()]
    return weights.copy_(code[halves] * scales)


@unpack_nf4.register_fake
def _(packed: torch.Tensor, *settings: Any) -> torch.Tensor:
    return packed.new_empty(2 * packed.numel(), dtype=settings[-1])
