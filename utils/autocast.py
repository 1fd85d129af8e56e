"""Autocast on any device: torch has none for the meta device, where plans compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_PRODUCTS = frozenset((F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.addmm, torch.bmm))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Inside this context products compute in `dtype`; as they are if that is fp32."""
    if dtype == torch.float32:
        return nullcontext()
    if device.type == "meta":
        return _ProductsIn(dtype)
    return torch.autocast(device.type, dtype, cache_enabled=False)


class _ProductsIn(TorchFunctionMode):
    """Casts the floating inputs of products, as autocast does with them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _PRODUCTS:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return function(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor
