"""LoRA on a mixture's experts: two factors for each expert, multiplied by grouped products next to the frozen weights.

peft keeps the factors of all experts in two matrices, A [r * experts, in] and B [out, r * experts], and adds their
product, as large as the experts, to the weights in each forward. Here each token only meets the factors of its experts:
parameters, names and files are peft's, and no product of A and B is formed.
"""

from __future__ import annotations

from itertools import pairwise
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import ParamWrapper
from torch.utils.flop_counter import register_flop_formula
from transformers import PreTrainedModel

from policies.experts.finding import find_experts
from policies.experts.forward import grouped_product, has_grouped_mm, set_product

_ALIGNMENT = 16
"""Bytes of which `F.grouped_mm` needs each row to have a multiple."""


def use_grouped_factors(model: PreTrainedModel) -> None:
    """Let tokens meet the factors of their own experts only. Experts without adapters stay as they are.

    Args:
        model: after `compute_by_products`, with peft's wrappers inside.
    """
    experts = {id(module) for module in find_experts(model).values()}
    wrappers: list[Any] = [m for m in model.modules() if isinstance(m, ParamWrapper)]
    if not (wrappers := [wrapper for wrapper in wrappers if id(wrapper.get_base_layer()) in experts]):
        return
    for wrapper in wrappers:
        base, name = wrapper.get_base_layer(), wrapper.parameter_name
        # In a plain dict: as a submodule, the wrapper would be inside itself.
        base.adapters = getattr(base, "adapters", {}) | {name: wrapper}
        base.base_products = getattr(base, "base_products", {}) | {name: base.products[name]}
        set_product(base, name, adapted_product)
        wrapper.forward = MethodType(_forward, wrapper)


def _forward(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    output: torch.Tensor = layer.base_layer(*args, **kwargs)
    return output


def adapted_product(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product with a weight that has an adapter, whichever way the weight itself is stored and multiplied."""
    outputs: torch.Tensor = experts.base_products[name](experts, name, rows, ends)
    layer = experts.adapters[name]
    if layer.disable_adapters or layer.merged:
        return outputs
    for adapter in layer.active_adapters:
        factor_a, factor_b = _by_expert(layer, adapter, len(ends))
        low = factor_product(rows, factor_a, ends) * layer.scaling[adapter]
        outputs = outputs + factor_product(low, factor_b, ends).to(outputs.dtype)
    return outputs


def _by_expert(layer: Any, adapter: str, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A as [experts, in, r] and B as [experts, r, out]: views, in which experts are A's outermost and B's innermost."""
    factor_a, factor_b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return (
        factor_a.unflatten(0, (num_experts, -1)).transpose(1, 2),
        factor_b.unflatten(1, (-1, num_experts)).permute(2, 1, 0),
    )


# Operators, not autograd functions, for the reason in policies/quantization/quantized_linear.py. And inductor has
# grouped products for bf16 alone. They keep the factors for backward, and not the copies that they multiply.


@torch.library.custom_op("lora::factor_product", mutates_args=())
def factor_product(rows: torch.Tensor, factors: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its own factor.

    Args:
        rows: [rows, n], sorted by expert.
        factors: [experts, n, m], with any strides.
        ends: int32 [experts], where each expert's rows end.

    Returns:
        [rows, m], in the rows' dtype.
    """
    left, right = _aligned(rows.contiguous(), factors, 1), _aligned(factors, rows, 1, 2)
    if 1 not in right.stride()[1:]:  # as of B: neither rows nor columns lie together
        right = right.contiguous()
    return grouped_product(left, right, ends)[:, : factors.shape[2]].to(rows.dtype).contiguous()


@factor_product.register_fake
def _(rows: torch.Tensor, factors: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], factors.shape[2])


@torch.library.custom_op("lora::factor_gradient", mutates_args=())
def factor_gradient(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the factors: the product of each expert's rows, transposed, and the gradients of its outputs.

    Args:
        rows: [rows, n], sorted by expert.
        grad: [rows, m].
        ends: int32 [experts], where each expert's rows end.
        dtype: of the factors.

    Returns:
        [experts, n, m], in that dtype.
    """
    rows, grad = rows.contiguous(), grad.contiguous()
    product = _product_by_expert(_aligned(rows, grad, 1).T, _aligned(grad, rows, 1), ends)
    # torch's tests leave out backward of experts without rows, whose results a GPU's kernel might not write.
    product.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0).view(-1, 1, 1), 0)
    return product[:, : rows.shape[1], : grad.shape[1]].to(dtype).contiguous()


@factor_gradient.register_fake
def _(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], grad.shape[1]), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, factors, ends = ctx.saved_tensors
    grad_rows = factor_product(grad, factors.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    grad_factors = factor_gradient(rows, grad, ends, factors.dtype) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_factors, None


factor_product.register_autograd(_backward, setup_context=_keep)


def _product_by_expert(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[n, rows] times [rows, m], for each expert over its own rows: [experts, n, m]."""
    if has_grouped_mm(left.device):
        return F.grouped_mm(left, right, offs=ends)
    starts_and_ends = pairwise([0, *ends.tolist()])
    return torch.stack([left[:, start:end] @ right[start:end] for start, end in starts_and_ends])


def _aligned(tensor: torch.Tensor, other: torch.Tensor, *dims: int) -> torch.Tensor:
    """The tensor in the dtype of its product with another, with zeros up to the sizes that `F.grouped_mm` takes.

    A GPU has grouped products in bf16 alone, whose results are bf16, too: factors are rounded as full training rounds
    weights.
    """
    on_gpu = tensor.is_cuda and torch.bfloat16 in (tensor.dtype, other.dtype)
    dtype = torch.bfloat16 if on_gpu else torch.promote_types(tensor.dtype, other.dtype)
    unit = _ALIGNMENT // dtype.itemsize
    missing = [-tensor.shape[dim] % unit if dim in dims else 0 for dim in reversed(range(tensor.dim()))]
    return F.pad(tensor.to(dtype), [n for m in missing for n in (0, m)]) if any(missing) else tensor.to(dtype)


@register_flop_formula(torch.ops.lora.factor_product)
def _(rows: torch.Size, factors: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * rows[0] * factors[1] * factors[2]


@register_flop_formula(torch.ops.lora.factor_gradient)
def _(rows: torch.Size, grad: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * rows[0] * rows[1] * grad[1]
