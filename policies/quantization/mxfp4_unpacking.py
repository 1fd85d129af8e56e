"""Unpacking experts in MXFP4, by our own kernel or by torch."""

from __future__ import annotations

import torch

from policies.mxfp4 import GROUP, NUMBERS, numbers_of


def unpack_mxfp4(
    packed: torch.Tensor, exponents: torch.Tensor, num_parts: int, dtype: torch.dtype, *, own_kernel: bool
) -> torch.Tensor:
    """The numbers that MXFP4 stands for.

    Args:
        packed: uint8 [bytes, 1], the first of two numbers in the lower half of a byte.
        exponents: uint8 [groups].
        num_parts: torch computes so many equal parts one by one: in fp32 it needs several times their memory.
        own_kernel: the Triton kernel does it.

    Returns:
        [2 * bytes]
    """
    weights = packed.new_empty(2 * packed.numel(), dtype=dtype)
    if own_kernel:
        from policies.quantization.mxfp4_kernel import unpack_into  # needs Triton

        unpack_into(weights, packed, exponents, torch.tensor(NUMBERS, device=packed.device))
        return weights
    parts = (tensor.view(num_parts, -1) for tensor in (weights, packed, exponents))
    for numbers, of_part, exponents_of_part in zip(*parts, strict=True):
        numbers.copy_(numbers_of(of_part.view(-1, GROUP // 2), exponents_of_part).view(-1))
    return weights
