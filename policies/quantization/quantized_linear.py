"""Linear layers whose frozen weights are stored in 4 or 8 bits, by bitsandbytes' kernels.

bitsandbytes' own modules keep the statistics of a packed weight (absmax and the like) on the parameter. `fully_shard`
replaces parameters by plain ones, so every forward would have to put them together again. Here the packed weight is a
plain parameter from the start, and its statistics are buffers of the module, whole on every rank. So the same forward
serves every layout and compiles without graph breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from policies.quantization.packing import BLOCK, Quantization, pack, statistics_of, unpack_4bit, unpack_8bit
from utils.errors import ConfigError

PACKED_ROWS = 1536  # up to so many rows bitsandbytes 0.50 may multiply by packed weights as they are, and faster


class QuantizedLinear(nn.Linear):
    """A linear layer with a packed weight, which has no values until the result of `quantize` is copied into it.

    Attributes:
        weight: [packed elements, 1] of the storage dtype, frozen; sharded like any other parameter.
        in_features, out_features: of the unpacked weight.
        scale: with 8 bits, the largest absolute value of each row, fp32 [out_features].
        absmax, code: with 4 bits, the scale of each block, and the values of the sixteen codes. With double
            quantization absmax is uint8, to be decoded by `offset`, `nested_absmax` and `nested_code`.
    """

    scale: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    offset: torch.Tensor
    nested_absmax: torch.Tensor
    nested_code: torch.Tensor

    def __init__(self, linear: nn.Linear, quantization: Quantization) -> None:
        # Not nn.Linear's own, which would allocate a weight of the plain shape.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.quantization = quantization
        elements_per_weight = 8 // quantization.bits * quantization.storage_dtype.itemsize
        if self.num_weights % elements_per_weight:
            remedy = "--quantization 8bit" if quantization.storage_dtype.itemsize == 1 else "--quant_storage uint8"
            raise ConfigError(
                f"--quantization: {self.out_features} x {self.in_features} weights do not fill whole elements of "
                f"{quantization.storage_dtype}; give {remedy}"
            )
        packed = torch.empty(
            self.num_weights // elements_per_weight, 1, dtype=quantization.storage_dtype, device="meta"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.on_quantized: Callable[[torch.Tensor], None] | None = None  # called with the packed values

    @property
    def plain_shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def packed_weights(self) -> dict[str, QuantizedLinear]:
        """What packs each packed parameter (utils/parameters.py): here the layer itself."""
        return {"weight": self}

    @property
    def stored_as(self) -> str:
        return self.quantization.name

    @torch.no_grad()
    def quantize(self, whole: torch.Tensor) -> torch.Tensor:
        """Pack a whole weight [out_features, in_features]; its statistics become buffers.

        Values are rounded to the compute dtype first, as in transformers, so that a checkpoint gives the same bytes
        in both.

        Returns:
            [packed elements, 1] of the storage dtype.
        """
        packed = self._pack(whole.to(self.quantization.compute_dtype).contiguous()).view(-1)
        packed = packed.view(self.quantization.storage_dtype).view(-1, 1)
        if self.on_quantized is not None:
            self.on_quantized(packed)
        return packed

    def _pack(self, whole: torch.Tensor) -> torch.Tensor:
        """The packed bytes; registers the statistics as buffers."""
        packed, statistics = pack(whole, self.quantization)
        for name, values in statistics.items():
            self.register_buffer(name, values, persistent=False)
        return packed

    def statistics_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each statistic."""
        sizes = statistics_of(self.num_weights, self.out_features, self.quantization)
        return {name: ((size,), dtype) for name, (size, dtype) in sizes.items()}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] in the inputs' dtype, computed in the compute dtype."""
        computed = inputs.to(self.quantization.compute_dtype)
        if self.quantization.bits == 8:
            outputs = linear_8bit(computed, self._int8(), self.scale)
        else:
            outputs = linear_4bit(
                computed,
                self._bytes(),
                self._statistics(),
                list(self.plain_shape),
                self.quantization.quant_type,
                self.quantization.own_unpacking,
            )
        if self.bias is not None:
            outputs = outputs + self.bias.to(outputs.dtype)
        return outputs.to(inputs.dtype)

    def dequantize(self) -> torch.Tensor:
        """The unpacked weight, [out_features, in_features], in the compute dtype."""
        if self.weight.is_meta:
            return torch.empty(self.plain_shape, dtype=self.quantization.compute_dtype, device="meta")
        if self.quantization.bits == 8:
            return unpack_8bit(self._int8(), self.scale, self.quantization.compute_dtype)
        settings = self.quantization
        kernel = (settings.quant_type, settings.own_unpacking)
        return unpack_4bit(self._bytes(), self._statistics(), self.plain_shape, *kernel, settings.compute_dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The packed weight. By this name peft recognizes layers with a `dequantize`, such as HQQ's."""
        return self.weight

    def _bytes(self) -> torch.Tensor:
        return self.weight.view(torch.uint8).view(-1, 1)

    def _int8(self) -> torch.Tensor:
        return self.weight.view(torch.int8).view(self.plain_shape)

    def _statistics(self) -> list[torch.Tensor]:
        nested = [self.offset, self.nested_absmax, self.nested_code] if self.quantization.use_double_quant else []
        return [self.absmax, self.code, *nested]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.stored_as}"


# The products are custom operators, not autograd functions: in a compiled graph each is one node, which activation
# checkpointing can recompute. torch 2.11 keeps the output of an autograd function instead.


@torch.library.custom_op("quantization::linear_4bit", mutates_args=())
def linear_4bit(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    statistics: list[torch.Tensor],
    shape: list[int],
    quant_type: str,
    own_unpacking: bool,
) -> torch.Tensor:
    """Multiply [..., in] by a packed weight of `shape` [out, in]: [..., out].

    bitsandbytes computes it, or torch by the weight as our own kernel unpacks it.

    Args:
        packed: uint8 [bytes, 1].
        statistics: absmax and code of `QuantizedLinear`; with double quantization also offset, nested_absmax and
            nested_code.
        own_unpacking: more rows than PACKED_ROWS are multiplied by the weight as our own kernel unpacks it.
    """
    # Rows that end inside a block: bitsandbytes 0.50 takes wrong scales for them on a CPU (`unpack_4bit`).
    is_cut = inputs.device.type == "cpu" and shape[-1] % BLOCK
    if is_cut or (own_unpacking and inputs.numel() > PACKED_ROWS * inputs.shape[-1]):
        weight = unpack_4bit(packed, statistics, shape, quant_type, own_unpacking, inputs.dtype)
        return nn.functional.linear(inputs, weight)
    absmax, _, *nested = statistics
    gemm = torch.ops.bitsandbytes.gemm_4bit.default
    if not nested:
        return gemm(inputs, packed, shape, absmax, BLOCK, quant_type)
    offset, nested_absmax, nested_code = nested
    codes = {"absmax_8bit": absmax, "absmax_code": nested_code, "absmax_offset": offset}
    return gemm(inputs, packed, shape, nested_absmax, BLOCK, quant_type, **codes)


@linear_4bit.register_fake
def _(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    statistics: list[torch.Tensor],
    shape: list[int],
    quant_type: str,
    own_unpacking: bool,
) -> torch.Tensor:
    return inputs.new_empty((*inputs.shape[:-1], shape[0]))


def _keep_packed_4bit(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, packed, statistics, *ctx.of_weight = inputs  # shape, type, and which kernel unpacks
    ctx.save_for_backward(packed, *statistics)


def _backward_4bit(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    packed, *statistics = ctx.saved_tensors
    shape, quant_type, own_unpacking = ctx.of_weight
    weight = unpack_4bit(packed, statistics, shape, quant_type, own_unpacking, grad.dtype)
    return grad @ weight, None, [None] * len(statistics), None, None, None


linear_4bit.register_autograd(_backward_4bit, setup_context=_keep_packed_4bit)


@torch.library.custom_op("quantization::linear_8bit", mutates_args=())
def linear_8bit(inputs: torch.Tensor, int8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply [..., in] by the weight packed in int8 [out, in] with scale [out]: [..., out].

    The unpacked weight is not kept. bitsandbytes does the same on CPUs and in every backward. Its int8 product for GPUs
    is not used: it rounds the inputs too, except for some columns that it chooses by all rows of the batch, so
    unrelated documents would change each other's loss.
    """
    return nn.functional.linear(inputs, unpack_8bit(int8, scale, inputs.dtype))


@linear_8bit.register_fake
def _(inputs: torch.Tensor, int8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return inputs.new_empty((*inputs.shape[:-1], int8.shape[0]))


def _keep_packed_8bit(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward_8bit(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    int8, scale = ctx.saved_tensors
    return grad @ unpack_8bit(int8, scale, grad.dtype), None, None


linear_8bit.register_autograd(_backward_8bit, setup_context=_keep_packed_8bit)


QUANTIZED_PRODUCTS = (torch.ops.quantization.linear_4bit.default, torch.ops.quantization.linear_8bit.default)


@register_flop_formula([torch.ops.quantization.linear_4bit, torch.ops.quantization.linear_8bit])
def _(inputs: torch.Size, *args: Any, out_shape: torch.Size, **kwargs: Any) -> int:
    return 2 * inputs.numel() * out_shape[-1]
