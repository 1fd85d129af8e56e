"""Linear layers whose frozen weights are stored in float8, and multiplied so: the base of LoRA under --float8.

A weight is rounded to float8 once, when it is read. Each product rounds its other factor, activations or gradients, to
float8, and sums in fp32. So forward and backward use the same stored weight, and the gradient of the inputs is that of
this weight, but for the rounding of the incoming gradient.

| recipe     | scales of weights | of activations, of gradients | activations | gradients |
|------------|-------------------|------------------------------|-------------|-----------|
| tensorwise | one               | one per micro-batch          | e4m3        | e5m2      |
| rowwise    | one per output    | one per token                | e4m3        | e4m3      |

Scales are computed as torchao's recipes of these names compute them; those of rows are powers of two. torchao itself is
not needed: it has no layer that stores float8 and passes gradients on. e4m3 has 4 significant binary digits and e5m2
has 3 (Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from policies.quantization.quantized_linear import QuantizedLinear

WEIGHTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
TENSORWISE, ROWWISE = "float8 tensorwise", "float8 rowwise"
SMALLEST = 1e-12  # largest absolute values below it are taken for it, as torchao does


class FrozenFloat8Linear(QuantizedLinear):
    """A linear layer with a frozen float8 weight.

    Attributes:
        weight: the bytes of the float8 weight, [elements, 1] of the storage dtype; sharded like any other parameter.
        scale: fp32, what stored values are multiplied by: [1] (tensorwise) or [out_features] (rowwise).
    """

    @property
    def is_rowwise(self) -> bool:
        return self.quantization.quant_type == ROWWISE

    def _pack(self, whole: torch.Tensor) -> torch.Tensor:
        rounded, scale = to_float8(whole, WEIGHTS, rowwise=self.is_rowwise)
        self.register_buffer("scale", scale.view(-1), persistent=False)
        return rounded.view(torch.uint8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] in the inputs' dtype."""
        computed = inputs.to(self.quantization.compute_dtype)
        with torch.no_grad():  # outside of the operator, so that compiled code fuses it
            rounded, scale = to_float8(computed.flatten(0, -2), WEIGHTS, rowwise=self.is_rowwise)
        outputs = linear_float8(computed, rounded, scale, self._float8(), self.scale)
        if self.bias is not None:
            outputs = outputs + self.bias.to(outputs.dtype)
        return outputs.to(inputs.dtype)

    def dequantize(self) -> torch.Tensor:
        """The stored weight, [out_features, in_features], in the compute dtype."""
        dtype = self.quantization.compute_dtype
        if self.weight.is_meta:
            return torch.empty(self.plain_shape, dtype=dtype, device="meta")
        return (self._float8().float() * self.scale.unsqueeze(1)).to(dtype)

    def _float8(self) -> torch.Tensor:
        return self.weight.view(torch.uint8).view(WEIGHTS).view(self.plain_shape)


def to_float8(values: torch.Tensor, dtype: torch.dtype, *, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, columns] rounded to a float8 dtype, and their scale: values = rounded * scale.

    Returns:
        Float8 [rows, columns], and fp32 [rows, 1] (rowwise) or [1, 1].
    """
    largest = values.abs().amax(dim=1, keepdim=True) if rowwise else values.abs().amax().view(1, 1)
    limit = torch.finfo(dtype).max
    # In fp64, since compiled code divides in fp32 by a reciprocal, and would find other scales.
    factor = (limit / largest.double().clamp(min=SMALLEST)).float()
    if rowwise:
        # Powers of two, as in torchao's rowwise recipe: products with them are exact, and _backward relies on that.
        factor = factor.log2().floor().exp2()
    rounded = values.float().mul_(factor).clamp_(-limit, limit).to(dtype)
    return rounded, factor.reciprocal()


# Operators, as the products of policies/quantization/quantized_linear.py are, and for its reasons. They hold the
# products alone: all else of forward and backward is traced and fused.


@torch.library.custom_op("quantization::linear_float8", mutates_args=())
def linear_float8(
    inputs: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Multiply inputs by a float8 weight.

    Args:
        inputs: [..., in]; only their shape and dtype are used, and they get the gradient.
        rounded, scale: the inputs [rows, in] in float8, and fp32 [rows, 1] or [1, 1].
        weight, weight_scale: float8 [out, in], and fp32 [out] or [1].

    Returns:
        [..., out] of the inputs' dtype.
    """
    outputs = _product(rounded, scale, weight, weight_scale.unsqueeze(0), inputs.dtype, fast=True)
    return outputs.unflatten(0, inputs.shape[:-1])


@linear_float8.register_fake
def _(
    inputs: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    return inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


@torch.library.custom_op("quantization::linear_float8_grad", mutates_args=())
def linear_float8_grad(
    rounded: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply gradients [rows, out] in float8 by a transposed float8 weight [in, out]: [rows, in] of `dtype`.

    Args:
        scale: fp32 [1, 1], of the product.
    """
    return _product(rounded, scale, weight, torch.ones_like(scale), dtype, fast=False)


@linear_float8_grad.register_fake
def _(rounded: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rounded.new_empty((rounded.shape[0], weight.shape[0]), dtype=dtype)


def _product(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> torch.Tensor:
    """[m, k] times the transpose of [n, k], both contiguous float8, with scales [m, 1] and [1, n], or both [1, 1].

    Args:
        fast: sum in fewer digits than fp32 has, as torchao does in forward alone.
    """
    if left.device.type == "cpu":  # emulated: the exact product of the rounded values, summed in fp32
        return ((left.float() * left_scale) @ (right.float() * right_scale.t()).t()).to(dtype)
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=fast
    )


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *_, weight, weight_scale = inputs
    ctx.rowwise = weight_scale.shape[0] > 1
    ctx.save_for_backward(weight, weight_scale)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, weight_scale = ctx.saved_tensors
    rows = grad.flatten(0, -2)
    if not ctx.rowwise:
        rounded, scale = to_float8(rows, GRADIENTS, rowwise=False)
        product = linear_float8_grad(rounded, scale * weight_scale, _transposed(weight, scale), grad.dtype)
    else:
        # The sum runs over the weight's rows, so their scales multiply the gradient. All scales are powers of two, so
        # that products with them are exact in any dtype, and the kernel without scales, which is faster, serves.
        rounded, scale = to_float8(rows * weight_scale.to(rows.dtype), WEIGHTS, rowwise=True)
        transposed = _transposed(weight, scale[:1])
        product = linear_float8_grad(rounded, torch.ones_like(scale[:1]), transposed, grad.dtype) * scale.to(grad.dtype)
    return product.unflatten(0, grad.shape[:-1]), None, None, None, None


def _transposed(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A float8 matrix transposed and contiguous: tensor cores read the second factor of a product by columns.

    Args:
        scale: of the gradient, positive, [1, 1]. It takes part without changing anything, so that compiled code
            transposes in backward. Of the weight alone it would do so in forward, and keep the result until then.
    """
    nothing = (scale < 0).to(torch.uint8)
    return (weight.view(torch.uint8).t() ^ nothing).contiguous().view(weight.dtype)


linear_float8.register_autograd(_backward, setup_context=_keep_weight)

FLOAT8_PRODUCTS = (torch.ops.quantization.linear_float8.default,)


@register_flop_formula(torch.ops.quantization.linear_float8)
def _(inputs: torch.Size, *args: Any, out_shape: torch.Size, **kwargs: Any) -> int:
    return 2 * inputs.numel() * out_shape[-1]


@register_flop_formula(torch.ops.quantization.linear_float8_grad)
def _(rounded: torch.Size, *args: Any, out_shape: torch.Size, **kwargs: Any) -> int:
    return 2 * rounded.numel() * out_shape[-1]
