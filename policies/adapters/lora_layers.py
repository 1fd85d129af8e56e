"""LoRA layers with peft's results that keep less for backward and multiply faster.

Adapters are trained in fp32 on a base that computes in bf16 or fp16. peft casts their inputs to fp32. This copy,
after dropout, is the largest tensor that an adapted layer keeps: twice the size of its input, which is kept anyway. And
fp32 products do not use the tensor cores. Here the input is kept as it is. An fp32 number is the sum of three bf16
numbers, so an adapter's products with bf16 activations are computed as bf16 products summed in fp32: as exact, and on
tensor cores.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeGuard

import torch
from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
from torch import nn

from policies.adapters.dropout_masks import draw_dropout
from policies.adapters.initial_factors import first_half_trained
from policies.adapters.lora_products import WRITTEN_ONCE, project_down, project_up


def use_lean_forward(model: nn.Module, *, num_trained_ranks: int | None = None) -> None:
    """Give every plain LoRA layer a forward that computes the same, keeps less and is faster.

    Args:
        num_trained_ranks: ranks behind these stay as they are (`policies.adapters.initial_factors`); None: all train.
    """
    plain: list[Any] = [m for m in model.modules() if is_plain(m)]
    for layer in plain:
        layer.num_trained_ranks = num_trained_ranks
        layer.forward = MethodType(_forward, layer)  # one function, so one compiled graph, for all layers


def adapts_linear(layer: nn.Module) -> TypeGuard[LoraLayer]:
    """Whether this is peft's layer around a linear one, or its wrapper around the weight of one."""
    of_weight = isinstance(layer, ParamWrapper) and isinstance(layer.get_base_layer(), nn.Linear)
    return isinstance(layer, Linear) or (of_weight and layer.parameter_name == "weight")


def drop_inputs(model: nn.Module, p: float) -> None:
    """Give the adapters of linear layers their dropout, which peft refuses if there are adapters of parameters."""
    for layer in filter(adapts_linear, model.modules()):
        layer.lora_dropout.update({name: nn.Dropout(p) for name in layer.lora_dropout})


def is_plain(layer: nn.Module) -> bool:
    """Whether this is a linear layer with two factors next to it, and nothing more."""
    # DoRA and other variants compute more than two products; peft's own forward serves them.
    return adapts_linear(layer) and not layer.lora_variant and all(b.bias is None for b in layer.lora_B.values())


def _forward(layer: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or "adapter_names" in kwargs:
        return type(layer).forward(layer, inputs, *args, **kwargs)
    outputs = base_outputs = layer.base_layer(inputs, *args, **kwargs)
    for name in layer.active_adapters:
        p = layer.lora_dropout[name].p if layer.training and hasattr(layer.lora_dropout[name], "p") else 0.0
        dropout = draw_dropout(inputs, p) if p else None
        # Dropout's factor 1 / (1 - p) goes into the scale of the small product, which costs no pass over the inputs.
        factor_a, factor_b = layer.lora_A[name].weight, layer.lora_B[name].weight
        if layer.num_trained_ranks is not None:
            factor_a = first_half_trained(factor_a, layer.num_trained_ranks, 0)
            factor_b = first_half_trained(factor_b, layer.num_trained_ranks, 1)
        recomputed = torch.compiler.is_compiling() and vars(layer).get(WRITTEN_ONCE, False)
        low = project_down(inputs, factor_a, dropout, layer.scaling[name] / (1 - p), recomputed=recomputed)
        outputs = outputs + project_up(low, factor_b, base_outputs.dtype)
    return outputs.to(base_outputs.dtype)
