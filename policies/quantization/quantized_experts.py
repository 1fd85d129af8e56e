"""A mixture's experts whose frozen weights are stored in 4 or 8 bits, in bitsandbytes' formats or in MXFP4.

Experts are one parameter of three dimensions. It stays on its module under its name, packed, so that files and
sharding find it there. Each expert's matrix is packed alone, as it is stored: its bytes and scales are those that
bitsandbytes gives a matrix, and no block holds weights of two experts. In MXFP4 a matrix is [outputs, inputs], however
the model has it: published models have one exponent for 32 inputs of an output.

A product unpacks the whole parameter and multiplies it (`policies.experts.forward.grouped_product`). Backward unpacks
it again. So one parameter of one layer at a time is unpacked, and the host need not know which experts got tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from policies.experts.finding import ExpertWeight, expert_weights
from policies.experts.forward import grouped_product, set_product
from policies.mxfp4 import GROUP
from policies.quantization.mxfp4_unpacking import unpack_mxfp4
from policies.quantization.packing import (
    BLOCK,
    MXFP4,
    NESTED_BLOCK,
    Quantization,
    pack,
    statistics_of,
    unpack_4bit,
    unpack_8bit,
)
from utils.errors import ConfigError


class PackedExperts(nn.Module):
    """How one parameter of a module of experts is packed, with its statistics. The parameter is not held here.

    A matrix is filled up with zeros to whole blocks, and its `absmax` to whole nested blocks, if they are none.

    Attributes:
        exponents: in MXFP4, uint8 [experts, groups].
        scale: with 8 bits, the largest absolute value of each row of each matrix, fp32 [experts, rows].
        absmax, code: with 4 bits, the scale of each block [experts, blocks], and the values of the sixteen codes [16].
            With double quantization absmax is uint8, to be decoded by `offset` [experts, 1], `nested_absmax` [experts,
            nested blocks] and `nested_code` [256].
    """

    exponents: torch.Tensor
    scale: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    offset: torch.Tensor
    nested_absmax: torch.Tensor
    nested_code: torch.Tensor

    def __init__(self, weight: ExpertWeight, quantization: Quantization) -> None:
        super().__init__()
        matrix = (weight.out_features, weight.in_features)
        self.plain_shape = torch.Size((weight.num_experts, *(matrix[::-1] if weight.is_transposed else matrix)))
        self.is_turned = weight.is_transposed and quantization.quant_type == MXFP4  # packed unlike the model has it
        self.is_transposed = weight.is_transposed and not self.is_turned
        if quantization.quant_type == MXFP4 and weight.in_features % GROUP:
            raise ConfigError(
                f"--quantization: experts of {weight.in_features} inputs do not fill groups of {GROUP}; give 4bit"
            )
        self.quantization = quantization
        self.on_quantized: Callable[[torch.Tensor], None] | None = None  # called with the packed values

    @property
    def num_weights(self) -> int:
        return self.plain_shape.numel()

    @property
    def stored_as(self) -> str:
        return self.quantization.name

    def empty(self) -> torch.Tensor:
        """What a packed parameter looks like, on the meta device: [packed elements, 1] of the storage dtype."""
        settings = self.quantization
        num_bytes = self.plain_shape[0] * _filled(self.plain_shape) * settings.bits // 8
        shape = (num_bytes // settings.storage_dtype.itemsize, 1)
        return torch.empty(shape, dtype=settings.storage_dtype, device="meta")

    @torch.no_grad()
    def quantize(self, whole: torch.Tensor) -> torch.Tensor:
        """Pack a whole parameter [experts, ...], one matrix at a time; its statistics become buffers.

        Values are rounded to the compute dtype first, as those of linear layers are.

        Returns:
            [packed elements, 1] of the storage dtype.
        """
        settings, found = self.quantization, list[dict[str, torch.Tensor]]()
        num_bytes = _filled(self.plain_shape) * settings.bits // 8
        packed = torch.zeros(len(whole), num_bytes, dtype=torch.uint8, device=whole.device)
        for matrix, place in zip(whole, packed, strict=True):
            values = (matrix.t() if self.is_turned else matrix).to(settings.compute_dtype).contiguous()
            if settings.bits == 4:
                values = nn.functional.pad(values.view(-1), (0, _filled(self.plain_shape) - values.numel()))
            of_matrix, statistics = pack(values, settings)
            place[: of_matrix.numel()] = of_matrix.view(-1).view(torch.uint8)
            found.append(statistics)
        for name, (shape, _) in self.statistics_shapes().items():
            values = found[0][name] if len(shape) == 1 else torch.stack([of_one[name].view(-1) for of_one in found])
            self.register_buffer(name, nn.functional.pad(values, (0, shape[-1] - values.shape[-1])), persistent=False)
        stored = packed.view(-1).view(settings.storage_dtype).view(-1, 1)
        if self.on_quantized is not None:
            self.on_quantized(stored)
        return stored

    def statistics_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each statistic."""
        num_experts, num_rows, _ = self.plain_shape
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        sizes = statistics_of(_filled(self.plain_shape), num_rows, self.quantization)
        for name, (size, dtype) in sizes.items():
            if name in ("code", "nested_code"):  # the same of every matrix
                shapes[name] = ((size,), dtype)
            else:
                is_nested = name == "absmax" and self.quantization.use_double_quant
                shapes[name] = ((num_experts, _up_to(size, NESTED_BLOCK) if is_nested else size), dtype)
        return shapes

    def multiply(self, rows: torch.Tensor, ends: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Multiply each expert's rows with its matrix, in the compute dtype: [rows, in] -> [rows, out].

        Args:
            rows, ends: as of `policies.experts.forward.grouped_product`.
            packed: the parameter.
        """
        settings = self.quantization
        product: torch.Tensor = experts_product(
            rows.to(settings.compute_dtype),
            ends,
            packed.view(torch.uint8).view(-1, 1),
            self._statistics(),
            list(self._packed_shape),
            settings.quant_type,
            settings.own_unpacking,
            self.is_transposed,
        )
        return product.to(rows.dtype)

    def dequantize(self, packed: torch.Tensor) -> torch.Tensor:
        """The unpacked parameter, of its plain shape, in the compute dtype."""
        settings = self.quantization
        kernel = (settings.quant_type, settings.own_unpacking)
        as_bytes = packed.view(torch.uint8).view(-1, 1)
        weights = _unpack(as_bytes, self._statistics(), self._packed_shape, *kernel, settings.compute_dtype)
        return weights.transpose(1, 2) if self.is_turned else weights

    @property
    def _packed_shape(self) -> torch.Size:
        num_experts, rows, columns = self.plain_shape
        return torch.Size((num_experts, columns, rows)) if self.is_turned else self.plain_shape

    def _statistics(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.statistics_shapes()]

    def extra_repr(self) -> str:
        return f"{tuple(self.plain_shape)}, {self.stored_as}"


def pack_experts(experts: Any, quantization: Quantization) -> None:
    """Give a module of experts packed parameters, without values yet, and products with them."""
    experts.packed_weights = nn.ModuleDict()
    for weight in expert_weights(experts):
        packing = experts.packed_weights[weight.name] = PackedExperts(weight, quantization)
        setattr(experts, weight.name, nn.Parameter(packing.empty(), requires_grad=False))
        set_product(experts, weight.name, packed_product)


def packed_product(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product with a packed parameter, as `policies.experts.forward.Product`."""
    product: torch.Tensor = experts.packed_weights[name].multiply(rows, ends, getattr(experts, name))
    return product


# A custom operator, as the products of quantized_linear.py are, and for their reasons.


@torch.library.custom_op("quantization::experts_product", mutates_args=())
def experts_product(
    rows: torch.Tensor,
    ends: torch.Tensor,
    packed: torch.Tensor,
    statistics: list[torch.Tensor],
    shape: list[int],
    quant_type: str,
    own_unpacking: bool,
    is_transposed: bool,
) -> torch.Tensor:
    """Multiply each expert's rows with its matrix, unpacked to the rows' dtype. It is its own backward.

    Args:
        rows: [rows, in], sorted by expert.
        ends: int32 [experts], where each expert's rows end.
        packed: uint8 [bytes, 1].
        statistics: of `PackedExperts`, in the order of `packing.statistics_of`.
        shape: [experts, out, in], or [experts, in, out] if `is_transposed`.
        own_unpacking: nf4 and MXFP4 are unpacked by our own kernels.

    Returns:
        [rows, out]
    """
    weights = _unpack(packed, statistics, shape, quant_type, own_unpacking, rows.dtype)
    return grouped_product(rows.contiguous(), weights if is_transposed else weights.transpose(-2, -1), ends)


@experts_product.register_fake
def _(
    rows: torch.Tensor,
    ends: torch.Tensor,
    packed: torch.Tensor,
    statistics: list[torch.Tensor],
    shape: list[int],
    quant_type: str,
    own_unpacking: bool,
    is_transposed: bool,
) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], shape[2 if is_transposed else 1]))


def _keep_packed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ends, packed, statistics, *ctx.of_weight = inputs
    ctx.save_for_backward(ends, packed, *statistics)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    ends, packed, *statistics = ctx.saved_tensors
    shape, quant_type, own_unpacking, is_transposed = ctx.of_weight
    of_rows = experts_product(grad, ends, packed, statistics, shape, quant_type, own_unpacking, not is_transposed)
    return of_rows, None, None, [None] * len(statistics), None, None, None, None


experts_product.register_autograd(_backward, setup_context=_keep_packed)

EXPERTS_PRODUCT = torch.ops.quantization.experts_product.default


def unpacked_bytes(rows: torch.Tensor, ends: torch.Tensor, packed: torch.Tensor, *settings: Any) -> int:
    """The bytes of the unpacked weights, which such a product holds until it returns."""
    _, shape, *_ = settings
    return math.prod(shape) * rows.element_size()


@register_flop_formula(torch.ops.quantization.experts_product)
def _(rows: torch.Size, *args: Any, out_shape: torch.Size, **kwargs: Any) -> int:
    return 2 * rows.numel() * out_shape[-1]


def _unpack(
    packed: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    shape: Sequence[int],
    quant_type: str,
    own_unpacking: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The parameter of this shape."""
    filled = _filled(shape)
    if quant_type == "int8":
        weights = packed.view(torch.int8).view(shape[0], filled)
        return unpack_8bit(_cut(weights, shape), statistics[0], dtype)
    if quant_type == MXFP4:
        weights = unpack_mxfp4(packed, statistics[0].view(-1), shape[0], dtype, own_kernel=own_unpacking)
        return _cut(weights.view(shape[0], filled), shape)
    weights = unpack_4bit(packed, statistics, [shape[0], filled], quant_type, own_unpacking, dtype)
    return _cut(weights, shape)


def _cut(weights: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Matrices [experts, weights and what fills them up] without the latter, [experts, ...]."""
    return weights[:, : shape[1] * shape[2]].unflatten(1, (shape[1], shape[2]))


def _filled(shape: Sequence[int]) -> int:
    """The weights that a matrix of [experts, rows, columns] takes the room of: whole blocks of them."""
    return _up_to(shape[1] * shape[2], BLOCK)


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
