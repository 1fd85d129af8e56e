"""The Triton kernel of policies/quantization/nf4_unpacking.py. Torch brings Triton for GPUs, and for Linux, alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BYTES, WARPS = 2048, 4  # of a program; the fastest of eight choices for weights of Llama-3.1-8B on an H200


def unpack_into(
    weights: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, block: int
) -> None:
    """Fill `weights` [2 * bytes]; the others as `policies.quantization.nf4_unpacking.unpack_nf4` takes them."""
    num_bytes = packed.numel()
    programs = (triton.cdiv(num_bytes, BYTES),)
    with torch.cuda.device(packed.device):
        _unpack[programs](packed, absmax, code, weights, num_bytes, block // 2, BYTES=BYTES, num_warps=WARPS)


@triton.jit
def _unpack(packed, absmax, code, weights, num_bytes, block_bytes: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BYTES
    places = first + tl.arange(0, BYTES)
    both = tl.load(packed + places, mask=places < num_bytes, other=0).to(tl.int32)
    scales = tl.load(absmax + places // block_bytes, mask=places < num_bytes, other=0.0)
    pairs = tl.interleave(tl.load(code + (both >> 4)) * scales, tl.load(code + (both & 15)) * scales)
    outputs = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(weights + outputs, pairs.to(weights.dtype.element_ty), mask=outputs < 2 * num_bytes)
