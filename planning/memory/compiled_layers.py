"""The tensors that a compiled layer keeps for backward: fewer than the same layer uncompiled.

torch.compile's partitioner recomputes cheap operators in backward, chiefly elementwise ones between products, and keeps
the outputs of products, and their inputs that backward reads (torch/_functorch/partitioners.py,
`min_cut_rematerialization_partition`). So of what autograd keeps of a layer, this keeps the outputs of products,
attention and reductions, and such inputs of products as the gradient of another input is computed from; anything else
is traced back to those that it is computed from. Random masks are drawn again from their seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planning.memory.device_kernels import FUSED_ATTENTION
from policies.activations.checkpointing import MATRIX_PRODUCTS

_aten = torch.ops.aten
_PRODUCTS = (
    *MATRIX_PRODUCTS,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.embedding.default,
    FUSED_ATTENTION,
)
_REDUCTIONS = (_aten.mean.dim, _aten.sum.dim_IntList, _aten.native_layer_norm.default, _aten._softmax.default)


class CompiledLayer(TorchDispatchMode):
    """Follows the forward pass of one layer. It holds every tensor meanwhile, so that none takes another's address."""

    def __init__(self, existing: Any) -> None:
        """
        Args:
            existing: the layer's arguments, parameters and buffers, which are there anyway.
        """
        super().__init__()
        self._made: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # by storage: a tensor, its inputs
        self._fixed: set[int] = set()  # storages that products read or return
        self._saved: list[torch.Tensor] = []
        self._existing = {_key(leaf) for leaf in tree_leaves(existing) if isinstance(leaf, torch.Tensor)}

    @contextmanager
    def following(self) -> Iterator[None]:
        with self, torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def kept_bytes(self, outputs: Any) -> dict[int, int]:
        """The bytes of each new storage that the layer keeps, those of its outputs included."""
        kept: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in self._existing:
                kept[_key(leaf)] = leaf
        seen: set[int] = set()
        todo = list(self._saved)
        while todo:
            tensor = todo.pop()
            key = _key(tensor)
            if key in seen or key in self._existing or key not in self._made:
                continue
            seen.add(key)
            made, sources = self._made[key]
            # Anything else is computed again from its inputs, which are kept instead.
            if key in self._fixed or not sources:
                kept[key] = made
            else:
                todo += sources
        return {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                # setdefault, since an operator in place returns its input, which keeps its origin.
                self._made.setdefault(_key(leaf), (leaf, [source for source in inputs if _key(source) != _key(leaf)]))
                if function in (*_PRODUCTS, *_REDUCTIONS):
                    self._fixed.add(_key(leaf))
        if function in _PRODUCTS and not _drops(function, args):
            for index, source in enumerate(inputs):
                # The gradient of one factor needs the other.
                if any(other.requires_grad for other in (*inputs[:index], *inputs[index + 1 :])):
                    self._fixed.add(_key(source))
        # Random masks are not kept: they are drawn again from their seeds.
        if function is _aten.bernoulli_.float:
            self._existing.add(_key(outputs))
        if function is _aten.native_dropout.default:
            self._existing.add(_key(outputs[1]))
        return outputs

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.append(tensor)
        return tensor


def _drops(function: Any, args: Any) -> bool:
    """Whether this is an adapter's product of inputs after dropout, which backward computes again from the inputs."""
    return function is torch.ops.lora.product_down.default and args[2] is not None


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
