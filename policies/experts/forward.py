"""The forward of a mixture's experts, with products that adapters and packed weights can take part in.

Tokens are sorted by expert, so one grouped product multiplies each expert's tokens with its matrix. transformers'
own forward does the same with plain parameters; here a module says by which function each of its weights is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from policies.experts.finding import expert_weights, find_experts, weight_names
from policies.experts.row_order import RowOrder, rows_of_tokens, sort_by_expert, tokens_of_rows

BY_PRODUCTS = "experts_by_products"
"""The name by which transformers knows `experts_forward`."""

Product = Callable[[Any, str, torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies rows with a weight of a module of experts: (experts, name, rows, ends) -> outputs.

`rows` are [rows, in], sorted by expert; `ends` int32 [experts], where each expert's rows end; outputs [rows, out].
A function of a module, the same one in every layer, so that layers share a compiled graph: what it needs of a layer it
reads from `experts`.
"""


def compute_by_products(model: PreTrainedModel) -> None:
    """Give the model's experts, if it has some, this forward, with plain products. `set_product` changes one."""
    found = find_experts(model)
    if not found:
        return
    ALL_EXPERTS_FUNCTIONS.register(BY_PRODUCTS, experts_forward)
    model.set_experts_implementation(BY_PRODUCTS)
    for experts in found.values():
        experts.plain_weights = expert_weights(experts)
        experts.products = dict.fromkeys(weight_names(experts), plain_product)


def set_product(experts: Any, name: str, product: Product) -> None:
    experts.products[name] = product


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs, with the signature of transformers' functions of experts.

    Args:
        experts: a module of `find_experts`.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, chosen], the experts of each token.
        top_k_weights: [tokens, chosen].

    Returns:
        [tokens, hidden]
    """
    order = sort_by_expert(top_k_index, experts.num_experts)
    rows = rows_of_tokens(hidden_states, order.order, order.places)
    weights = top_k_weights.reshape(-1).index_select(0, order.order).unsqueeze(-1)
    first, second = weight_names(experts)
    inner = _with_bias(experts, first, _multiply(experts, first, rows, order), order)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    if has_norm:
        outputs = _with_bias(experts, second, _multiply(experts, second, inner, order), order)
        outputs = experts.post_expert_norm(outputs) * weights
    else:
        # Weighted here, where rows are narrower than outputs, which backward then need not keep.
        outputs = _multiply(experts, second, (inner * weights).to(inner.dtype), order)
    summed = tokens_of_rows(outputs.to(hidden_states.dtype), order.order, order.places, hidden_states.shape[0])
    if experts.has_bias and not has_norm:
        bias = getattr(experts, f"{second}_bias")
        summed = (summed + _weighted_bias(bias, top_k_index, top_k_weights)).to(summed.dtype)
    return summed


def _multiply(experts: Any, name: str, rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
    product: torch.Tensor = experts.products[name](experts, name, rows, order.ends)
    return product


def _with_bias(experts: Any, name: str, outputs: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """The outputs of a product, with its bias if it has one."""
    if not experts.has_bias:
        return outputs
    return outputs + getattr(experts, f"{name}_bias")[order.expert_of_row].to(outputs.dtype)


def _weighted_bias(bias: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the chosen experts' biases, in fp32: [experts, hidden] to [tokens, hidden].

    A product with all experts: a bias for each row would be kept for the gradient of its weight.
    """
    of_experts = top_k_weights.new_zeros(len(top_k_index), len(bias), dtype=torch.float32)
    return of_experts.scatter(1, top_k_index, top_k_weights.float()) @ bias.float()


def plain_product(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product with a parameter that is as transformers made it."""
    weight = getattr(experts, name)
    return grouped_product(rows, weight if experts.is_transposed else weight.transpose(-2, -1), ends)


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows with its matrix, in the matrices' dtype.

    Args:
        rows: [rows, in], sorted by expert.
        weights: [experts, in, out].
        ends: int32 [experts], where each expert's rows end.

    Returns:
        [rows, out]
    """
    rows = rows.to(weights.dtype)
    # inductor has the grouped product for bf16 alone. transformers' operator is a loop, which waits for the device.
    is_compilable = not torch.compiler.is_compiling() or weights.dtype == torch.bfloat16
    if is_compilable and has_grouped_mm(weights.device):
        return nn.functional.grouped_mm(rows, weights, offs=ends)
    product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
    return product


def has_grouped_mm(device: torch.device) -> bool:
    """Whether torch has grouped products for this device: for CPUs, and for GPUs from capability 8.0 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
