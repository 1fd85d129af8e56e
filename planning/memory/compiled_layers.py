"""The tensors that a compiled layer keeps for backward: fewer than the same layer uncompiled.

torch.compile's partitioner recomputes cheap operators in backward, chiefly elementwise ones between products, and keeps
the outputs of products, and their inputs that backward reads (torch/_functorch/partitioners.py,
`min_cut_rematerialization_partition`). Operators that are not torch's own count as products: it recomputes none. So
this finds the tensors of the fewest bytes from which all that autograd keeps of a layer is computed again, among the
outputs of products, attention and reductions, such inputs of products as the gradient of another input is computed
from, and whatever is computed from these. Random masks are drawn again from their seeds. If backward needs only a slice
of what is computed from kept tensors, inductor writes that slice alone (the values of a delta rule, out of its
convolution).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from policies.activations.checkpointing import MATRIX_PRODUCTS
from policies.tiling.compiled import AROUND_TILES
from policies.tiling.tiles import tiled_parts

_aten = torch.ops.aten
_PRODUCTS = (
    *MATRIX_PRODUCTS,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.embedding.default,
    _aten._grouped_mm.default,
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
        self._outputs_of_products: set[int] = set()
        self._saved: list[torch.Tensor] = []
        self._adapted: dict[int, int] = {}  # by width: the bytes of what adapters add to, or multiply, of that width
        self._existing = {_key(leaf) for leaf in tree_leaves(existing) if isinstance(leaf, torch.Tensor)}

    @contextmanager
    def following(self) -> Iterator[None]:
        with self, torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def kept_bytes(self, outputs: Any) -> dict[int, int]:
        """The bytes of each new storage that the layer keeps, those of its outputs included."""
        returned = {_key(leaf): leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        kept = {key: tensor for key, tensor in returned.items() if key not in self._existing}
        kept |= {key: self._made[key][0] for key in self._cheapest_cut(free=kept.keys())}
        there = self._existing | kept.keys()
        return {
            key: tensor.untyped_storage().nbytes() if key in returned else self._bytes_of(key, tensor, there)
            for key, tensor in kept.items()
        }

    def fused_bytes(self, hidden: int) -> int:
        """The bytes more that are there at once if backward computes the layer again, in the same graph.

        inductor fuses an MLP's elementwise code, of forward and of backward, into a kernel or two. They read what
        adapters add, in fp32 and not summed yet, and write the adapter's input after dropout twice, for two products.
        Of Llama-3.1-8B with adapters on all projections these are 112 and 56 KiB per token (docs/decisions.md).

        Args:
            hidden: the width of hidden states; what is no wider is not there at the fullest moment.
        """
        return self._adapted[widest] if (widest := max(self._adapted, default=0)) > hidden else 0

    def _bytes_of(self, key: int, tensor: torch.Tensor, there: Collection[int]) -> int:
        """The bytes kept of one storage: those of its saved slices, if it is computed from storages that are there."""
        whole = tensor.untyped_storage().nbytes()
        _, sources = self._made.get(key, (tensor, []))
        if key in self._outputs_of_products or not sources or not all(_key(source) in there for source in sources):
            return whole
        slices = {(t.storage_offset(), t.shape): t.nbytes for t in self._saved if _key(t) == key}
        return min(whole, sum(slices.values()) or whole)

    def _cheapest_cut(self, free: Collection[int]) -> set[int]:
        """The storages, of the fewest bytes together, that all saved ones can be computed from.

        The partitioner's own problem: a minimum cut between what is not computed again and what backward reads.

        Args:
            free: storages that are there anyway.
        """
        import networkx  # here: it takes a fifth of a second, and only plans of compiled layers need it

        graph = networkx.DiGraph()
        graph.add_nodes_from(("made", "read"))
        for key, (tensor, sources) in self._made.items():
            if key in self._existing or key in free:
                continue
            graph.add_edge((key, "in"), (key, "out"), capacity=tensor.untyped_storage().nbytes())
            if key in self._fixed or not sources:
                graph.add_edge("made", (key, "in"))  # without a capacity: never cut
            else:
                graph.add_edges_from(((_key(source), "out"), (key, "in")) for source in sources)
        graph.add_edges_from(((_key(tensor), "out"), "read") for tensor in self._saved)
        _, (side_of_made, _) = networkx.minimum_cut(graph, "made", "read")
        return {key for key in self._made if (key, "in") in side_of_made and (key, "out") not in side_of_made}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        is_product = function in _PRODUCTS or function.namespace != "aten"
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                # setdefault, since an operator in place returns its input, which keeps its origin.
                self._made.setdefault(_key(leaf), (leaf, [source for source in inputs if _key(source) != _key(leaf)]))
                if is_product or function in _REDUCTIONS:
                    self._fixed.add(_key(leaf))
                    self._outputs_of_products.add(_key(leaf))
        if is_product and not _drops(function, args):
            for index, source in enumerate(inputs):
                # The gradient of one factor needs the other.
                if any(other.requires_grad for other in (*inputs[:index], *inputs[index + 1 :])):
                    self._fixed.add(_key(source))
        self._note_adapted(function, args, outputs)
        # Random masks are not kept: they are drawn again from their seeds.
        if function is _aten.bernoulli_.float:
            self._existing.add(_key(outputs))
        if function is _aten.native_dropout.default:
            self._existing.add(_key(outputs[1]))
        return outputs

    def _note_adapted(self, function: Any, args: Any, outputs: Any) -> None:
        wide = outputs if function is torch.ops.lora.product_up.default else args[0] if _drops(function, args) else None
        if wide is not None:
            size = wide.nbytes if wide is outputs else 2 * wide.nbytes
            self._adapted[wide.shape[-1]] = self._adapted.get(wide.shape[-1], 0) + size

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.append(tensor)
        return tensor


class HeldGradients:
    """The gradients that the code before a layer's tiles gets in backward, held until that ends.

    This code is one graph. Its backward gets the gradients of the layer's output, which the residual passes on, and of
    the tiles' input. torch 2.11 refers to both until it ends, so they are there while attention has its backward. 2.13
    frees them after their last use (pytorch pull request 177837); for it this is a bound.
    """

    def __init__(self, around_tiles: bool) -> None:
        """
        Args:
            around_tiles: layers are compiled around tiles; else nothing is held.
        """
        self._around_tiles = around_tiles
        self._gradients: list[torch.Tensor] = []

    def watch(self, layer: nn.Module) -> list[RemovableHandle]:
        """Hooks for a forward pass of the layer, by which gradients of its tiles' inputs will be held."""

        def watch_input(part: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(self.hold)

        parts = [part for part in tiled_parts(layer) if [*part.children()]] if self._around_tiles else []
        return [part.register_forward_pre_hook(watch_input) for part in parts]

    def freed_early(self, layer: nn.Module, of_hidden: int) -> int:
        """The bytes by which this layer's backward is emptier at its fullest moment than the pass counts.

        A layer with adapters on all that is around its tiles is fullest in attention's backward, compiled, and the pass
        finds as many bytes in that of the projections before it, which compiled code has not. They were the same on an
        H100 as long as inductor kept a dead gradient there, as wide as the hidden states, for a later one
        (`policies.tiling.compiled.AROUND_TILES`). inductor's code for layers with fewer adapters, or none, has no such
        gradient.

        Args:
            of_hidden: bytes of the layer's hidden states.
        """
        frees = self._around_tiles and AROUND_TILES.get("allow_buffer_reuse") is False
        return of_hidden if frees and _all_adapted(layer) else 0

    def hold(self, gradient: torch.Tensor) -> None:
        if self._around_tiles:
            self._gradients.append(gradient)

    def release(self) -> None:
        self._gradients.clear()


def _all_adapted(layer: nn.Module) -> bool:
    """Whether all matrices of this layer that are in none of its tiles have adapters."""
    known = {id(inner) for part in tiled_parts(layer) for inner in part.modules()}
    adapted = [module for module in layer.modules() if id(module) not in known and hasattr(module, "lora_A")]
    known |= {id(inner) for module in adapted for inner in module.modules()}
    left = (p for m in layer.modules() if id(m) not in known for p in m.parameters(recurse=False))
    return bool(adapted) and all(parameter.dim() < 2 for parameter in left)


def _drops(function: Any, args: Any) -> bool:
    """Whether this is an adapter's product of inputs after dropout, which backward computes again from the inputs."""
    return function is torch.ops.lora.product_down.default and args[2] is not None


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
