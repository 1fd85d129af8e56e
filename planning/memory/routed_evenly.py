"""Tokens of a mixture whose code asks which experts have tokens, next to tensors without values (LongCat)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class _RoutedEvenly(TorchDispatchMode):
    """Every expert has tokens, all experts as many: the places that are not zero are asked for, and counted so."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.nonzero.default or not args[0].is_meta:
            return function(*args, **(kwargs or {}))
        (asked,) = args
        if asked.dim() == 1:  # which experts have tokens; a loop over them reads their numbers
            return torch.arange(len(asked))[:, None]
        return asked.new_empty(-(-asked.numel() // self.num_experts), asked.dim(), dtype=torch.int64)  # one's choices


@contextmanager
def routed_evenly(model: nn.Module) -> Iterator[None]:
    """A context for a pass on the meta device, if the model has such experts (`total_experts`, as LongCat names it)."""
    numbers: list[Any] = [module.total_experts for module in model.modules() if hasattr(module, "total_experts")]
    with _RoutedEvenly(int(numbers[0])) if numbers else nullcontext():
        yield
