"""Values that a plan's micro-batch has, such as the grids of images, next to tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as experimental
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_BY_PLACES = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class _MetaWins(TorchDispatchMode):
    """Operators of tensors with values and of others take them all for tensors without: models count positions and
    offsets from grids, and go on with them on the device."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.is_meta for tensor in tensors if tensor.dim()}) > 1:
            args, kwargs = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        if function in _BY_PLACES:  # where a mask of the text says: at the features of images (Qwen3-VL)
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        return function(*args, **kwargs)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        if index is None or index.dtype != torch.bool or index.dim() < 2:
            return [index]
        return [index.new_empty(self.num_features, dtype=torch.int64) for _ in range(index.dim())]


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta") if tensor.dim() else tensor


@contextmanager
def known_values(num_features: int) -> Iterator[None]:
    """A context for a pass with such a micro-batch. No image in it is one that only fills up.

    Args:
        num_features: tokens of its text that stand for images.
    """
    before = experimental.meta_nonzero_assume_all_nonzero
    experimental.meta_nonzero_assume_all_nonzero = True
    try:
        with _MetaWins(num_features):
            yield
    finally:
        experimental.meta_nonzero_assume_all_nonzero = before
