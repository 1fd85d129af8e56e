"""DoRA's magnitudes, computed from the base's weights."""

from __future__ import annotations

from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from policies.adapters.from_base import set_from_base
from policies.weights.sources import keep_part


def set_magnitudes(model: nn.Module) -> None:
    """Set each output's magnitude to the norm of its row of W + scaling B A, so that DoRA begins at the base.

    Every rank must call this. See https://arxiv.org/abs/2402.09353, section 4; the arithmetic is peft's.
    """
    set_from_base(
        model,
        lambda layer: bool(layer.lora_magnitude_vector),
        lambda layers: [{name: _norm(layer, name) for name in layer.lora_magnitude_vector} for layer in layers],
        _store,
    )


def _store(layer: Any, norms: dict[str, torch.Tensor]) -> None:
    for adapter, norm in norms.items():
        keep_part(layer.lora_magnitude_vector[adapter].weight, norm)


def _norm(layer: Any, adapter: str) -> torch.Tensor:
    """[out_features], fp32."""
    factor_a, factor_b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    weight = dequantize_module_weight(layer.get_base_layer()).to(factor_a.device)
    own = layer.lora_magnitude_vector[adapter]
    return own.get_weight_norm(weight, factor_b @ factor_a, layer.scaling[adapter])
