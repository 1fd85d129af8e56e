"""Values of adapters that are computed from the base's weights, which are read last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


@torch.no_grad()
def set_from_base(
    model: nn.Module,
    is_wanted: Callable[[LoraLayer], bool],
    compute: Callable[[list[Any]], list[T]],
    store: Callable[[Any, T], None],
) -> None:
    """Compute values of adapted layers while their base's weights are whole, and store them.

    The model has its weights and may be sharded: units are gathered one at a time, as for the forward. Every rank must
    call this.

    Args:
        compute: layers of one unit, whole -> a value of each.
        store: called with a layer and its value once its unit is sharded again, since gathered parameters are copies.
    """
    layers_of: dict[FSDPModule | None, list[Any]] = {}
    unit_of: dict[nn.Module, FSDPModule] = {}
    for module in model.modules():  # outer units come first, so the innermost, which gathers, is kept
        if isinstance(module, FSDPModule):
            unit_of |= dict.fromkeys(module.modules(), module)
    for module in model.modules():
        if isinstance(module, LoraLayer) and is_wanted(module):
            layers_of.setdefault(unit_of.get(module), []).append(module)
    for unit, layers in layers_of.items():
        if unit is not None:
            unit.unshard()
        values = compute(layers)
        if unit is not None:
            unit.reshard()
        for layer, value in zip(layers, values, strict=True):
            store(layer, value)
