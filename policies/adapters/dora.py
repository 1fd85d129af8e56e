"""DoRA's magnitudes, computed from the base's weights, which are read last."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.distributed.fsdp import FSDPModule

from policies.weights.sources import keep_part


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Set each output's magnitude to the norm of its row of W + scaling B A, so that DoRA begins at the base.

    The model has its weights and may be sharded: units are gathered one at a time, as for the forward. Every rank must
    call this. See https://arxiv.org/abs/2402.09353, section 4; the arithmetic is peft's.
    """
    layers_of: dict[FSDPModule | None, list[Any]] = {}
    unit_of: dict[nn.Module, FSDPModule] = {}
    for module in model.modules():  # outer units come first, so the innermost, which gathers, is kept
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
            # After resharding: writes go to the shards, since gathered parameters are copies.
            keep_part(layer.lora_magnitude_vector[adapter].weight, norm)


def _norm(layer: Any, adapter: str) -> torch.Tensor:
    """[out_features], fp32."""
    factor_a, factor_b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    weight = dequantize_module_weight(layer.get_base_layer()).to(factor_a.device)
    own = layer.lora_magnitude_vector[adapter]
    return own.get_weight_norm(weight, factor_b @ factor_a, layer.scaling[adapter])
