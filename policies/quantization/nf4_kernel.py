"""The Triton kernel of policies/quantization/nf4_unpacking.py. Torch brings Triton for GPUs, and for Linux, alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BYTES, WARPS = 2048, 4  # of a program; the fastest of eight choices for weights of Llama-3.1-8B on an H200


def unpack_into(
    weights: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested: Sequence[torch.Tensor],
    block: int,
    nested_block: int,
) -> None:
    """Fill `weights` [2 * bytes]; the others as `policies.quantization.nf4_unpacking.unpack_nf4` takes them."""
    num_bytes, num_matrices = packed.numel(), absmax.shape[0]
    offset, nested_absmax, nested_code = nested or (absmax, absmax, absmax)  # which the kernel then does not read
    with torch.cuda.device(packed.device):
        # Without fused multiply-adds: bitsandbytes rounds the product of nested scales before it adds the offset.
        _unpack[(triton.cdiv(num_bytes, BYTES),)](
            packed, absmax, code, offset, nested_absmax, nested_code, weights,
            num_bytes=num_bytes, of_matrix=triton.cdiv(2 * num_bytes, block) // num_matrices,
            num_scales=absmax.shape[1], BLOCK_BYTES=block // 2, BLOCKS=2 * BYTES // block, NESTED_BLOCK=nested_block,
            IS_NESTED=bool(nested), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    packed, absmax, code, offset, nested_absmax, nested_code, weights, num_bytes, of_matrix, num_scales,
    BLOCK_BYTES: tl.constexpr, BLOCKS: tl.constexpr, NESTED_BLOCK: tl.constexpr, IS_NESTED: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    matrices = blocks // of_matrix
    places = matrices * num_scales + blocks % of_matrix
    is_there = blocks * BLOCK_BYTES < num_bytes
    scales = tl.load(absmax + places, mask=is_there, other=0)
    if IS_NESTED:
        of_nested = tl.load(nested_absmax + places // NESTED_BLOCK, mask=is_there, other=0.0)
        codes = tl.load(nested_code + scales.to(tl.int32), mask=is_there, other=0.0)
        scales = codes * of_nested + tl.load(offset + matrices, mask=is_there, other=0.0)
    both_places = blocks[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    both = tl.load(packed + both_places, mask=both_places < num_bytes, other=0).to(tl.int32)
    pairs = tl.interleave(tl.load(code + (both >> 4)), tl.load(code + (both & 15))) * scales[:, None]
    outputs = blocks[:, None] * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    tl.store(weights + outputs, pairs.to(weights.dtype.element_ty), mask=outputs < 2 * num_bytes)
