"""Counts the weights of a model. A packed parameter has fewer elements than weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class Counted(NamedTuple):
    parameter: nn.Parameter
    shape: torch.Size  # of the whole tensor, however it is sharded or packed
    stored_as: str  # "float32", "nf4"

    @property
    def num_weights(self) -> int:
        return self.shape.numel()


def packed_weights(module: nn.Module) -> Mapping[str, Any]:
    """How a module's own parameters are packed, by their names; those that are not packed are left out.

    A module that packs some says so by an attribute of this name. Each has a `plain_shape` and a name of what it is
    `stored_as`.
    """
    found: Any = getattr(module, "packed_weights", None)
    return dict(found.items()) if found is not None else {}


def count_weights(model: nn.Module) -> Iterator[Counted]:
    """Each parameter once."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        packed = packed_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            if name in packed:
                yield Counted(parameter, packed[name].plain_shape, str(packed[name].stored_as))
            else:
                yield Counted(parameter, parameter.shape, str(parameter.dtype).removeprefix("torch."))
