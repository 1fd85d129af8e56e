"""Which modules are the sharding units: found in the model, not in a list of names."""

from __future__ import annotations

from typing import Any

from torch import nn


def find_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks: members of a ModuleList whose class the model itself says must not be split.

    Nested blocks come before those that hold them, as `fully_shard` needs. Empty where the model names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    listed = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    return [m for m in reversed(list(model.modules())) if type(m).__name__ in names and id(m) in listed]


def has_tied_embeddings(model: Any) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def find_units(model: Any, wrap: str = "layer") -> list[nn.Module]:
    """Modules that are gathered one at a time; what none of them holds belongs to the root unit.

    Empty with `wrap` "root" or where the model names no layers: the root unit is then the whole model. The input
    embedding is a unit of its own unless it shares its weight with the head: shared parameters must stay in one unit.
    The head stays in the root unit, where the loss needs it.
    """
    units = find_layers(model) if wrap == "layer" else []
    if units and not has_tied_embeddings(model):
        units.append(model.get_input_embeddings())
    return units
