"""The two products of a LoRA layer, as exact as in fp32, on tensor cores: operators that keep less for backward.

An fp32 number is the sum of three bf16 numbers, so an adapter's products with bf16 activations are computed as bf16
products summed in fp32. This file imports no peft: selective checkpointing names the operators, with or without LoRA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from policies.adapters.dropout_masks import Dropout, mask_like

WRITTEN_ONCE = "writes_dropped_input_once"
"""An attribute of adapters: compiled code is to write their input after dropout once, as of `project_down`."""


def project_down(
    inputs: torch.Tensor, weight: torch.Tensor, dropout: Dropout | None, scale: float, *, recomputed: bool = False
) -> torch.Tensor:
    """The input after dropout times A, in the dtype of A. The inputs are cast to it, but kept as they are.

    Args:
        inputs: [..., in].
        weight: A, [r, in].
        dropout: None keeps all.
        scale: factor on the product.
        recomputed: compiled code computes this again in the graph of backward. Then the input after dropout takes the
            place of the input: written once there, it serves both products.

    Returns:
        [..., r]
    """
    if recomputed and dropout is not None:
        inputs, dropout = torch.where(mask_like(inputs, dropout.mask_or_keys, dropout.p), inputs, 0.0), None
    factor = _narrow_factor(weight.detach().T, inputs.dtype)
    p, mask_or_keys = dropout or (0.0, None)
    # Another operator than backward's, or compiled code would compute this once, and keep it for backward.
    dropped = inputs.detach()
    if mask_or_keys is not None:
        dropped = torch.where(mask_like(inputs, mask_or_keys, p), dropped, 0.0)
    return _sum_of_parts(product_down(inputs, weight, mask_or_keys, p, dropped, factor), weight.shape[0]) * scale


def project_up(low: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The output of A times B.

    Args:
        low: [..., r].
        weight: B, [out, r].
        dtype: of the outputs that the product is added to. The sum is rounded to it. So the gradient, which has B's
            dtype, has values that `dtype` holds exactly.

    Returns:
        [..., out], of B's dtype.
    """
    return product_up(low, weight, dtype, *_wide_factors(low.detach(), weight.detach().T, dtype))


# Both products are operators, not autograd functions, for the reason in policies/quantization/quantized_linear.py.
# The code around them is traced: compiled code fuses the dozen small kernels that split numbers into parts and sum them
# into one or two. So each operator gets both the factors that it multiplies and the tensors that backward needs.


@torch.library.custom_op("lora::product_down", mutates_args=())
def product_down(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    mask_or_keys: torch.Tensor | None,
    p: float,
    dropped: torch.Tensor,
    factor: torch.Tensor,
) -> torch.Tensor:
    """The input after dropout, [..., in], times the factor, [in, r or 3 r]: in the dtype of A."""
    return _narrow_mm(dropped.flatten(0, -2), factor, weight.dtype).unflatten(0, inputs.shape[:-1])


@product_down.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    return weight.new_empty((*inputs.shape[:-1], args[-1].shape[1]))


def _keep_down(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    activations, weight, mask_or_keys, ctx.p, *_ = inputs
    ctx.save_for_backward(activations, weight, mask_or_keys)


def _backward_down(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    inputs, weight, mask_or_keys = ctx.saved_tensors
    grad = grad.flatten(0, -2)[:, : weight.shape[0]]  # parts are summed, so the gradients of all are that of the sum
    mask = None if mask_or_keys is None else mask_like(inputs, mask_or_keys, ctx.p)
    grad_inputs = grad_weight = None
    if ctx.needs_input_grad[0]:
        left, right = _wide_factors(grad, weight, inputs.dtype)
        grad_inputs = _wide_mm(left, right, weight.dtype, inputs.dtype).view_as(inputs)
        grad_inputs = _dropped(grad_inputs, mask)
    if ctx.needs_input_grad[1]:
        grad_weight = _narrow_product(_dropped(inputs, mask).flatten(0, -2).T, grad).T
    return grad_inputs, grad_weight, None, None, None, None


product_down.register_autograd(_backward_down, setup_context=_keep_down)


@torch.library.custom_op("lora::product_up", mutates_args=())
def product_up(
    low: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """The product of the two factors of `low` and B, [..., r or 3 r] and [r or 3 r, out]: in the dtype of B."""
    return _wide_mm(left.flatten(0, -2), right, weight.dtype, weight.dtype).unflatten(0, low.shape[:-1])


@product_up.register_fake
def _(
    low: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    return low.new_empty((*low.shape[:-1], weight.shape[0]))


def _keep_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    low, weight, ctx.dtype, *_ = inputs
    ctx.save_for_backward(low, weight)


def _backward_up(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    low, weight = ctx.saved_tensors
    # Cast first: the layer's other product casts the same gradient, and compiled code then keeps one copy, not two.
    rows = grad.to(ctx.dtype).flatten(0, -2)
    grad_weight = _narrow_product(rows.T, low.flatten(0, -2)) if ctx.needs_input_grad[1] else None
    return _narrow_product(rows, weight).view_as(low), grad_weight, None, None, None


product_up.register_autograd(_backward_up, setup_context=_keep_up)


def _dropped(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    # The values times the mask. A plain product of two dtypes takes torch's general kernel, three times as long.
    return values if mask is None else torch.ops.aten.native_dropout_backward(values, mask, 1.0)


def _narrow_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[m, k] activations times [k, r] of an adapter's dtype: [m, r] in that dtype."""
    return _sum_of_parts(_narrow_mm(left, _narrow_factor(right, left.dtype), right.dtype), right.shape[1])


def _narrow_factor(right: torch.Tensor, activations: torch.dtype) -> torch.Tensor:
    """The right factor of activations times [k, r]: the matrix itself, or its three parts, bf16 [k, 3 r]."""
    return _bf16(_parts(right, 3), dim=1) if _in_parts(activations, right) else right


def _narrow_mm(left: torch.Tensor, factor: torch.Tensor, adapter: torch.dtype) -> torch.Tensor:
    """[m, r or 3 r] of the adapter's dtype out of activations and a narrow factor."""
    return left.to(adapter) @ factor if factor.dtype == adapter else torch.mm(left, factor, out_dtype=adapter)


def _sum_of_parts(product: torch.Tensor, rank: int) -> torch.Tensor:
    """[..., r] of a product with a narrow factor."""
    return product if product.shape[-1] == rank else product.unflatten(-1, (3, rank)).sum(-2)


def _wide_factors(
    left: torch.Tensor, right: torch.Tensor, rounded_to: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors for [..., r] times [r, n], both of an adapter's dtype, only as exact as `rounded_to` needs."""
    if not _in_parts(rounded_to, right):
        return left, right
    # The three largest products of parts are off by about 2^-15; bf16 rounds by 2^-8.
    (l1, l2), (r1, r2) = _parts(left, 2), _parts(right, 2)
    return _bf16([l1, l1, l2], dim=-1), _bf16([r1, r2, r1], dim=0)


def _wide_mm(left: torch.Tensor, right: torch.Tensor, adapter: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """[m, n] of `dtype` out of two wide factors of adapters."""
    return (left @ right).to(dtype) if left.dtype == adapter else torch.mm(left, right, out_dtype=dtype)


def _in_parts(activations: torch.dtype, adapter: torch.Tensor) -> bool:
    """Whether products of the two are computed in parts; CPUs compute bf16 slower than fp32."""
    return adapter.is_cuda and activations == torch.bfloat16 and adapter.dtype == torch.float32


def _parts(values: torch.Tensor, number: int) -> list[torch.Tensor]:
    """fp32 tensors that sum to the values. All but the last are bf16 numbers; of three, the last is too.

    The upper half of an fp32 number's bits is a bf16 number with a third of its digits. It is taken by its bits:
    compiled code omits a cast to bf16 and back, and the other parts would be zero.
    """
    parts = []
    for _ in range(number - 1):
        parts.append((values.view(torch.int32) & -(1 << 16)).view(torch.float32))
        values = values - parts[-1]
    return [*parts, values]


def _bf16(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim).to(torch.bfloat16)


LORA_PRODUCTS = (torch.ops.lora.product_down.default, torch.ops.lora.product_up.default)


@register_flop_formula(torch.ops.lora.product_down)
def _(inputs: torch.Size, weight: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * inputs.numel() * weight[0]


@register_flop_formula(torch.ops.lora.product_up)
def _(low: torch.Size, weight: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * low.numel() * weight[0]
