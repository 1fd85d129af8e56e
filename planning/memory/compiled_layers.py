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

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.activations.checkpointing import MATRIX_PRODUCTS, SelectiveChoice, is_attention

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


@dataclass(frozen=True)
class SelectiveKept:
    """What a selective layer keeps in bytes, its outputs included."""

    kept: int
    there: tuple[int, int]  # at most, besides gradients: before backward has reached the attention, and from then on


@dataclass(frozen=True)
class _Adapted:
    """A product of an adapter: the one whose output is wide, or the one whose input is."""

    width: int
    output: int  # its storage
    again: int  # bytes that the kernel of an activation reads or writes to compute it again
    in_backward: int  # bytes of the gradient of its input, and of the input after dropout, that this kernel has


class CompiledLayer(TorchDispatchMode):
    """Follows the forward pass of one layer.

    It holds every tensor meanwhile, so that none takes another's address. Autograd holds the hooks, and so this object,
    until the layer's backward is over: nothing that forward made is freed before.
    """

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
        self._adapted: list[_Adapted] = []
        self._choice = SelectiveChoice()
        self._chosen: set[int] = set()  # storages that a selective layer keeps, if backward needs them
        self._attended: set[int] = set()  # storages that attention reads
        self._of_attention: set[int] = set()  # storages that it returns
        self._existing = {_key(leaf) for leaf in tree_leaves(existing) if isinstance(leaf, torch.Tensor)}

    @contextmanager
    def following(self, at_attention: Callable[[], None] = lambda: None) -> Iterator[None]:
        """
        Args:
            at_attention: called when backward has reached the layer's attention.
        """

        def unpack(saved: tuple[torch.Tensor, bool]) -> torch.Tensor:
            tensor, is_attended = saved
            if is_attended:
                at_attention()
            return tensor

        with self, torch.autograd.graph.saved_tensors_hooks(self._save, unpack):
            yield

    def kept_bytes(self, outputs: Any) -> dict[int, int]:
        """The bytes of each new storage that the layer keeps, those of its outputs included."""
        returned = self._returned(outputs)
        kept = returned | {key: self._made[key][0] for key in self._cheapest_cut(self._saved, free=returned.keys())}
        kept |= {key: self._made[key][0] for key in self._instead_of_slices(kept)}
        there = self._existing | kept.keys()
        return {
            key: tensor.untyped_storage().nbytes() if key in returned else self._bytes_of(key, tensor, there)
            for key, tensor in kept.items()
        }

    def selective(self, outputs: Any, hidden: int) -> SelectiveKept:
        """The same of a selective layer. All that it does not keep is computed again, when backward needs it.

        What attention is computed from, backward needs when it has reached the attention.

        Args:
            hidden: as of `fused_bytes`.
        """
        returned = self._returned(outputs)
        chosen = self._needed(map(_key, self._saved), until=self._chosen | returned.keys()) & self._chosen
        kept = returned.keys() | chosen
        before_attention = self._needed(self._attended, until=chosen)
        first: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for tensor in self._saved:
            (rest if _key(tensor) in before_attention else first).append(tensor)
        again = {each.output for each in self._adapted if each.again} & self._needed(map(_key, first), until=kept)
        again -= before_attention
        in_backward = sum(each.in_backward for each in self._widest(hidden))
        left = chosen & (before_attention | self._of_attention)
        # What adapters add is there unsummed, as in `fused_bytes`; with that, sums are computed where they are read.
        there = kept | again | self._cheapest_cut(first, free=kept | again), left | self._cheapest_cut(rest, free=kept)
        return SelectiveKept(self._size(kept), (self._size(there[0]) + in_backward, self._size(there[1])))

    def _returned(self, outputs: Any) -> dict[int, torch.Tensor]:
        found = {_key(leaf): leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        return {key: tensor for key, tensor in found.items() if key not in self._existing}

    def _needed(self, keys: Iterable[int], until: Collection[int]) -> set[int]:
        """These storages, and those that they are computed from, as far as storages that are there."""
        found: set[int] = set()
        left = [*keys]
        while left:
            key = left.pop()
            if key in found or key in self._existing:
                continue
            found.add(key)
            if key not in until:
                left.extend(map(_key, self._made[key][1]))
        return found

    def _size(self, keys: Iterable[int]) -> int:
        return sum(self._made[key][0].untyped_storage().nbytes() for key in keys)

    def fused_bytes(self, hidden: int) -> int:
        """The bytes more that are there at once if backward computes the layer again, in the same graph.

        inductor fuses an MLP's elementwise code, of forward and of backward, into a kernel or two. They read what
        adapters add, in fp32 and not summed yet. Of Llama-3.1-8B with adapters on all projections these are 112 KiB per
        token (docs/decisions.md).

        Args:
            hidden: the width of hidden states; what is no wider is not there at the fullest moment.
        """
        return sum(each.again for each in self._widest(hidden))

    def _widest(self, hidden: int) -> list[_Adapted]:
        widest = max((each.width for each in self._adapted), default=0)
        return [each for each in self._adapted if each.width == widest > hidden]

    def _bytes_of(self, key: int, tensor: torch.Tensor, there: Collection[int]) -> int:
        """The bytes kept of one storage: those of its saved slices, if it is computed from storages that are there."""
        whole = tensor.untyped_storage().nbytes()
        _, sources = self._made.get(key, (tensor, []))
        if key in self._outputs_of_products or not sources or not all(_key(source) in there for source in sources):
            return whole
        slices = {(t.storage_offset(), t.shape): t.nbytes for t in self._saved if _key(t) == key}
        return min(whole, sum(slices.values()) or whole)

    def _instead_of_slices(self, kept: Collection[int]) -> set[int]:
        """Saved tensors that are kept besides the storage that they could be computed from.

        The partitioner counts slices as tensors of their own. If backward needs one slice of a sum and the sigmoid of
        another, it keeps the sigmoid, which is nearer to backward; but the slice holds the whole sum.
        """
        saved = {(_key(tensor), tensor.storage_offset(), tensor.nbytes) for tensor in self._saved}
        found = set()
        for key in {key for key, _, _ in saved} - self._existing - set(kept):
            tensor, sources = self._made[key]
            while len(sources) == 1 and (source := sources[0]).nbytes == tensor.nbytes:
                origin = _key(source)
                if origin in kept and (origin, source.storage_offset(), source.nbytes) not in saved:
                    is_slice = source.nbytes < source.untyped_storage().nbytes()
                    found |= {key} if is_slice and origin not in self._outputs_of_products else set()
                if origin in kept or origin not in self._made:
                    break
                sources = self._made[origin][1]
        return found

    def _cheapest_cut(self, saved: Sequence[torch.Tensor], free: Collection[int]) -> set[int]:
        """The storages, of the fewest bytes together, that all these saved ones can be computed from.

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
        graph.add_edges_from(((_key(tensor), "out"), "read") for tensor in saved)
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
        if self._choice.keeps(function, args, kwargs or {}):
            self._chosen |= {_key(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        if is_attention(function):
            self._attended |= {_key(source) for source in inputs} - self._existing
            self._of_attention |= {_key(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)}
        # Random masks are not kept: they are drawn again from their seeds.
        if function is _aten.bernoulli_.float:
            self._existing.add(_key(outputs))
        if function is _aten.native_dropout.default:
            self._existing.add(_key(outputs[1]))
        return outputs

    def _note_adapted(self, function: Any, args: Any, outputs: Any) -> None:
        if function is torch.ops.lora.product_up.default:
            self._adapted.append(_Adapted(outputs.shape[-1], _key(outputs), again=outputs.nbytes, in_backward=0))
        elif function is torch.ops.lora.product_down.default:
            size, drops = args[0].nbytes, _drops(function, args)
            in_backward = 2 * size if drops else size
            self._adapted.append(_Adapted(args[0].shape[-1], _key(outputs), again=0, in_backward=in_backward))

    def _save(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        self._saved.append(tensor)
        return tensor, _key(tensor) in self._attended


def _drops(function: Any, args: Any) -> bool:
    """Whether this is an adapter's product of inputs after dropout, which backward computes again from the inputs."""
    return function is torch.ops.lora.product_down.default and args[2] is not None


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
