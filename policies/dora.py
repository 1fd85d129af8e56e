"""DoRA's magnitudes: read off the base's weights, which are the last to come into a model."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.distributed.fsdp import FSDPModule

from policies.weight_sources import keep_part


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Let DoRA begin where the base stands: an output's magnitude is the norm of its row of W + scaling B A.

    The model has its weights, and may be sharded: one unit at a time is gathered, as for its forward. Every rank must
    call this. https://arxiv.org/abs/2402.09353, section 4; the arithmetic is peft's.
    """
    layers_of: dict[FSDPModule | None, list[Any]] = {}
    unit_of: dict[nn.Module, FSDPModule] = {}
    for module in model.modules():  # from the outermost unit to the innermost, which is the one that gathers
        if isinstance(module, FSDPModule):
            unit_of |= dict.fromkeys(module.modules(), module)
    for module in model.modules():
        if isinstance(module, LoraLayer) and module.lora_magnitude_vector:
            layers_of.setdefault(unit_of.get(module), []).append(module)
    for unit, layers in layers_of.items():
        if unit is not None:
            unit.unshard()
        norms = [(layer, adapter, _norm(layer, adapter)) for layer in layers for adapter in layer.lora_magnitude_vector]
        if unit is not None:
            unit.reshard()
        for layer, adapter, norm in norms:
            keep_part(layer.lora_magnitude_vector[adapter].weight, norm)


def _norm(layer: Any, adapter: str) -> torch.Tensor:
    """[out_features], fp32."""
    factor_a, factor_b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    weight = dequantize_module_weight(layer.get_base_layer()).to(factor_a.device)
    own = layer.lora_magnitude_vector[adapter]
    return own.get_weight_norm(weight, factor_b @ factor_a, layer.scaling[adapter])
