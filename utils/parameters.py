"""Counts the weights of a model. A quantized layer has more weights than its packed tensor has elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Counted(NamedTuple):
    parameter: nn.Parameter
    num_weights: int  # of the whole tensor, however it is sharded or packed
    stored_as: str  # "float32", "nf4"


def count_weights(model: nn.Module) -> Iterator[Counted]:
    """Each parameter once. A layer that packs its `weight` has the attributes `num_weights` and `stored_as`."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            num_packed = getattr(module, "num_weights", None) if name == "weight" else None
            if isinstance(num_packed, int):
                yield Counted(parameter, num_packed, str(module.stored_as))
            else:
                yield Counted(parameter, parameter.numel(), str(parameter.dtype).removeprefix("torch."))
