"""The Triton kernel of policies/quantization/mxfp4_unpacking.py. Torch brings Triton for GPUs, and for Linux, alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BYTES, WARPS = 2048, 4  # of a program, as of the kernel for nf4; not measured


def unpack_into(weights: torch.Tensor, packed: torch.Tensor, exponents: torch.Tensor, code: torch.Tensor) -> None:
    """Fill `weights` [2 * bytes]; the others as `policies.quantization.mxfp4_unpacking.unpack_mxfp4` takes them.

    Args:
        code: fp32 [16], the values of the codes.
    """
    num_bytes = packed.numel()
    programs = (triton.cdiv(num_bytes, BYTES),)
    with torch.cuda.device(packed.device):
        _unpack[programs](packed, exponents, code, weights, num_bytes, BYTES=BYTES, num_warps=WARPS)


@triton.jit
def _unpack(packed, exponents, code, weights, num_bytes, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BYTES
    places = first + tl.arange(0, BYTES)
    both = tl.load(packed + places, mask=places < num_bytes, other=0).to(tl.int32)
    exponent = tl.load(exponents + places // 16, mask=places < num_bytes, other=127).to(tl.int32)
    # 2^(exponent - 127) by its bits in fp32. The lowest one has no digit before the point, so it is written as 0.5.
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    scales = bits.to(tl.float32, bitcast=True)
    pairs = tl.interleave(tl.load(code + (both & 15)) * scales, tl.load(code + (both >> 4)) * scales)
    outputs = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(weights + outputs, pairs.to(weights.dtype.element_ty), mask=outputs < 2 * num_bytes)
