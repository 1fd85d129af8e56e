"""Packing a matrix into 4 or 8 bits with bitsandbytes' kernels, and unpacking it.

| bits | storage of the weights                                              | bits per weight for their scales    |
|------|----------------------------------------------------------------------|-------------------------------------|
| 4    | nf4 or fp4, in blocks of 64 (QLoRA, https://arxiv.org/abs/2305.14314) | 0.5; 0.127 with double quantization |
|      | MXFP4, in groups of 32 (policies/mxfp4.py), of experts alone          | 0.25                                |
| 8    | int8, by rows (LLM.int8(), https://arxiv.org/abs/2208.07339)          | 32 per row                          |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from policies.mxfp4 import GROUP, to_mxfp4
from policies.quantization.nf4_unpacking import unpack_nf4

BLOCK = 64  # weights per absmax
NESTED_BLOCK = 256  # absmax values per nested absmax, with double quantization; the kernels support no other number
INT8_MAX = 127
MXFP4 = "mxfp4"


@dataclass(frozen=True)
class Quantization:
    """How a run's quantized weights are stored and computed."""

    bits: int
    quant_type: str  # "nf4", "fp4", "int8" or MXFP4
    use_double_quant: bool
    compute_dtype: torch.dtype
    storage_dtype: torch.dtype  # of the tensors that hold the packed bytes; nothing is computed in it
    own_unpacking: bool = False  # nf4 and MXFP4 are unpacked by our own kernels, not by bitsandbytes and torch
    slow_because: str | None = None  # why they are not, where they would be faster

    @property
    def name(self) -> str:
        return self.quant_type + (" with double quantization" if self.use_double_quant else "")


class PackedWeight(Protocol):
    """What packs one parameter, and holds its statistics; `utils.parameters.packed_weights` finds it."""

    quantization: Quantization
    on_quantized: Callable[[torch.Tensor], None] | None  # called with the packed values

    @property
    def plain_shape(self) -> torch.Size: ...

    @property
    def num_weights(self) -> int: ...

    def statistics_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each statistic."""

    def quantize(self, whole: torch.Tensor) -> torch.Tensor:
        """Pack the whole weight, as the parameter keeps it; its statistics become buffers."""


def pack(matrix: torch.Tensor, settings: Quantization) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The packed bytes of a matrix [rows, columns] in the compute dtype, and its statistics.

    In MXFP4 `exponents`; with 8 bits `scale`; with 4 bits `absmax` and `code`, with double quantization also `offset`,
    `nested_absmax` and `nested_code`, as `policies.quantization.quantized_linear.QuantizedLinear` describes them.
    """
    if settings.quant_type == MXFP4:
        packed, exponents = to_mxfp4(matrix.view(-1, GROUP))
        return packed, {"exponents": exponents}

    from bitsandbytes import functional

    if settings.bits == 8:
        # bitsandbytes' kernel takes fp16 alone.
        packed, scale, _ = functional.int8_vectorwise_quant(matrix.to(torch.float16))
        return packed, {"scale": scale}
    packed, state = functional.quantize_4bit(
        matrix, blocksize=BLOCK, compress_statistics=settings.use_double_quant, quant_type=settings.quant_type
    )
    statistics = {"absmax": state.absmax, "code": state.code}
    if settings.use_double_quant:
        nested = {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        statistics |= nested
    return packed, statistics


def statistics_of(num_weights: int, num_rows: int, settings: Quantization) -> dict[str, tuple[int, torch.dtype]]:
    """The number of elements and the dtype of each statistic of a matrix."""
    if settings.quant_type == MXFP4:
        return {"exponents": (num_weights // GROUP, torch.uint8)}
    if settings.bits == 8:
        return {"scale": (num_rows, torch.float32)}
    num_blocks = -(-num_weights // BLOCK)
    if not settings.use_double_quant:
        return {"absmax": (num_blocks, torch.float32), "code": (16, torch.float32)}
    return {
        "absmax": (num_blocks, torch.uint8),
        "code": (16, torch.float32),
        "offset": (1, torch.float32),
        "nested_absmax": (-(-num_blocks // NESTED_BLOCK), torch.float32),
        "nested_code": (256, torch.float32),
    }


def unpack_4bit(
    packed: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    shape: Sequence[int],
    quant_type: str,
    own_unpacking: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A tensor of `shape`, computed as in bitsandbytes' own backward, and by either kernel to the same bits.

    Args:
        statistics: `absmax` and its offset have a row for each matrix, if several are unpacked at once.
    """
    if packed.is_meta:  # a plan has shapes alone, and so no need of bitsandbytes
        return packed.new_empty(tuple(shape), dtype=dtype)
    absmax, code, *nested = statistics
    if own_unpacking:
        by_matrix = absmax.view(-1, absmax.shape[-1])
        return unpack_nf4(packed, by_matrix, code, nested, BLOCK, NESTED_BLOCK, dtype).view(tuple(shape))
    if nested:
        absmax = _unpack_absmax(absmax, *nested)
    # Matrices are filled up to whole blocks, and in `absmax` to whole nested blocks.
    num_blocks = -(-math.prod(shape) // BLOCK) // (absmax.numel() // absmax.shape[-1])
    absmax = absmax[..., :num_blocks].reshape(-1)
    # As one row. Of several rows bitsandbytes 0.50 takes wrong scales on a CPU, if blocks do not end where rows do; its
    # product does so, too.
    # The row is [1, n]: of [n] the CPU's kernel makes that, which is not what torch.compile was told.
    row = [1, math.prod(shape)]
    return torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, BLOCK, quant_type, row, dtype).view(
        tuple(shape)
    )


def _unpack_absmax(
    absmax: torch.Tensor, offset: torch.Tensor, nested_absmax: torch.Tensor, nested_code: torch.Tensor
) -> torch.Tensor:
    """The scales in fp32, which double quantization stores in 8 bits."""
    operator = torch.ops.bitsandbytes.dequantize_blockwise.default
    scales: torch.Tensor = operator(absmax, nested_absmax.view(-1), nested_code, NESTED_BLOCK, torch.float32)
    return scales + offset


def unpack_8bit(int8: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like int8 [..., rows, columns]; `scale` [..., rows] is the largest absolute value of each row."""
    return int8.to(dtype).mul_((scale / INT8_MAX).unsqueeze(-1))  # in place: rounded once, with the scale in fp32
