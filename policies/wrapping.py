"""Which modules are sharding units: found in the model, not in a list of names."""

from __future__ import annotations

from typing import Any

from torch import nn


def find_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks: members of a ModuleList whose class is in the model's `_no_split_modules`.

    Nested blocks come before the blocks that hold them, as `fully_shard` needs. Empty if the model names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    listed = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    return [m for m in reversed(list(model.modules())) if type(m).__name__ in names and id(m) in listed]


def has_tied_embeddings(model: Any) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def find_units(model: Any, wrap: str = "layer") -> list[nn.Module]:
    """The modules that are gathered one at a time. All other parameters belong to the root unit.

    Empty if `wrap` is "root" or the model names no layers: the root unit is then the whole model. The input embedding
    is a unit unless another module has the same weight: the head, or the embeddings of encoder and decoder. Shared
    parameters must be in one unit. The head is in the root unit, because the loss needs it there.
    """
    units = find_layers(model) if wrap == "layer" else []
    embedding = model.get_input_embeddings()
    num_names = sum(p is embedding.weight for _, p in model.named_parameters(remove_duplicate=False))
    if units and num_names == 1:
        units.append(embedding)
    return units
