"""The bytes of layers and of a pass, as planning/memory/layer_memory.py counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from policies.activations.host_pool import pool_bytes


@dataclass(frozen=True)
class SelectiveBytes:
    """The bytes of a compiled selective layer, by the names of `LayerBytes`."""

    kept: int
    backward: int
    backward_with_grads: int


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of one layer, or of everything after the last layer."""

    kept: int  # bytes that forward adds and keeps, its output included, less an input that backward does not need
    forward: int  # peak of forward, beyond the bytes alive before it
    backward: int  # peak of backward, beyond the bytes alive before forward, without gradients of parameters
    backward_with_grads: int  # the same, with the gradients of its own parameters as they come
    moved: int = 0  # activations in host memory until backward; not part of `kept`
    on_host: int = 0  # host memory that these take
    movable: tuple[int, ...] = ()  # bytes of each storage that offloading would move
    fused: int = 0  # bytes more in backward if that computes the layer again, compiled (compiled_layers.py)
    selective: SelectiveBytes | None = None  # of the same layer if it is compiled and selective

    def recomputed_as(self, compiled: LayerBytes) -> LayerBytes:
        """The same of a recomputed layer whose backward, recomputation included, is one compiled graph.

        Args:
            compiled: of the same layer, compiled and not recomputed.
        """
        backward, with_grads = compiled.backward + compiled.fused, compiled.backward_with_grads + compiled.fused
        return replace(self, backward=backward, backward_with_grads=with_grads)

    def selective_as(self, compiled: LayerBytes) -> LayerBytes:
        """The same of a selective layer, compiled; one that is not compiled stays as it is.

        Args:
            compiled: of the same layer, compiled and not recomputed.
        """
        return self if compiled.selective is None else replace(self, **vars(compiled.selective))

    def offloaded(self) -> LayerBytes:
        """The same, with its movable activations in host memory."""
        moved = sum(self.movable)
        return replace(self, kept=self.kept - moved, moved=moved, on_host=sum(map(pool_bytes, self.movable)))


@dataclass(frozen=True)
class PassBytes:
    """One forward and backward pass, in bytes."""

    layers: tuple[tuple[nn.Module, LayerBytes], ...]  # in the order of forward
    between: int  # kept by operators before and between the layers
    loss: LayerBytes  # of everything after the last layer: norm, head and loss
    embedding_backward: int  # the peak after the first layer's backward, its gradients included

    def recomputed_as(self, compiled: PassBytes) -> PassBytes:
        """The same with layers as `LayerBytes.recomputed_as`."""
        return self._paired(compiled, LayerBytes.recomputed_as)

    def selective_as(self, compiled: PassBytes) -> PassBytes:
        """The same with layers as `LayerBytes.selective_as`."""
        return self._paired(compiled, LayerBytes.selective_as)

    def _paired(self, other: PassBytes, of_layer: Callable[[LayerBytes, LayerBytes], LayerBytes]) -> PassBytes:
        pairs = zip(self.layers, other.layers, strict=True)
        return replace(self, layers=tuple((layer, of_layer(use, same)) for (layer, use), (_, same) in pairs))
