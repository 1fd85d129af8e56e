"""Activation offloading: layers' saved tensors wait in host memory, and come back before backward needs them.

Of a checkpointed layer that is its input; what `selective` keeps besides stays on the device. Only the first layers
need to move, as many as the device lacks room for: they are needed last. Copies have a stream of their own:

| when                      | the stream that computes               | the stream that copies                   |
|---------------------------|----------------------------------------|------------------------------------------|
| layer n's forward ends    | waits for n - 1's copy; frees the      | waits for layer n; copies its tensors to |
|                           | tensors of n - 1 on the device         | the host, while layer n + 1 computes     |
| layer n's backward begins | waits until n's tensors are back       | waits for computing so far; brings back  |
|                           |                                        | those of n - 1, while layer n computes   |

So of the layers that move, the device holds the saved tensors of two. The layer after them, the border, keeps its own,
frees those of the last one that moved, and brings them back when its backward begins. Backward begins with the model's
last layer, so that one never moves.

Device memory is freed only after the computing stream was told to wait for the copy that reads or writes it: the next
user of that memory runs on this stream, and so after the copy.

Parameters, buffers, small tensors, and tensors that layers share, such as masks, stay on the device.
A storage is copied once, however many views of it are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from configs.training import TrainConfig
from policies.activations.transfers import Transfers
from policies.wrapping import outermost
from utils.errors import ConfigError
from utils.local_tensors import local_tensor
from utils.wording import plural

MIN_BYTES = 2**20
"""Smallest storage to be moved: below this the copy takes longer to start than to run."""


class Offloaded(NamedTuple):
    """What moves in a run, by its plan."""

    num_layers: int  # the first ones
    host_bytes: int  # that their copies take in a typical micro-batch


def num_offloaded(train: TrainConfig, num_layers: int, *, chosen: int | None) -> int:
    """How many of the first layers move what they save: all but the last one at most.

    Args:
        num_layers: of the model, none inside another.
        chosen: by the run's plan, for `auto`. Without a plan `auto` is all.

    Raises:
        ConfigError: if the model has fewer layers than were asked for.
    """
    if not train.activation_offloading:
        return 0
    asked = chosen if train.activation_offloading == "auto" else train.num_offloaded_layers
    if asked is not None and asked > num_layers:
        raise ConfigError(
            f"--num_offloaded_layers: {plural(asked, 'layer')} to offload, but this model has {num_layers}; leave it "
            "out for all but the last one"
        )
    return max(0, min(num_layers - 1, num_layers if asked is None else asked))


@dataclass(eq=False)
class _Kept:
    """The bytes of one storage: on the device, in host memory, or in both."""

    storage: torch.UntypedStorage | None
    copy: Any = None  # as of `Transfers`


@dataclass(eq=False)
class _LayerCall:
    """The saved tensors of one call of a layer. Autograd's graph owns it, so it is freed as backward goes on."""

    place: int
    before: _LayerCall | None
    # Weak: the graph's views own the bytes, so each goes as soon as its last view is used.
    kept: list[weakref.ref[_Kept]] = field(default_factory=list)
    is_here: bool = False  # on the device, for backward
    is_used: bool = False  # by backward

    def alive(self) -> Iterator[_Kept]:
        yield from (kept for ref in self.kept if (kept := ref()) is not None)


@dataclass(eq=False)
class _View:
    """A tensor that autograd saved: its view of a storage."""

    kept: _Kept
    group: _LayerCall
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        assert self.kept.storage is not None
        empty = torch.empty(0, dtype=self.dtype, device=self.kept.storage.device)
        return empty.set_(self.kept.storage, self.offset, self.size, self.stride)


class _Stays(NamedTuple):
    """A tensor that the border saved. Backward asks for it when the layers before are needed next."""

    tensor: torch.Tensor
    group: _LayerCall


class _Packing:
    """Collects the saved tensors of one call of a layer.

    Autograd's graph holds its method `pack`, and with it this object, so close() drops its references.
    """

    def __init__(
        self,
        group: _LayerCall,
        device: torch.device,
        layer: nn.Module,
        shared: Sequence[torch.Tensor],
        only: torch.Tensor | None,
    ) -> None:
        """
        Args:
            shared: never moves. only: nothing else moves; None: all that is saved does.
        """
        self._group, self._device = group, device
        self._layer: nn.Module | None = layer
        self._shared = shared
        self._only = None if only is None else key_of(only)
        self._stays: set[int] = set()
        self._found: dict[int, _Kept] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._layer is not None:  # at the first call: inside the layer's forward, where sharded weights are whole
            own = (local_tensor(tensor) for tensor in (*self._layer.parameters(), *self._layer.buffers()))
            self._stays, self._layer = {key_of(tensor) for tensor in (*own, *self._shared)}, None
        key = key_of(tensor) if is_movable(tensor, self._device) else None
        if key is None or key in self._stays or self._only not in (None, key):
            return tensor
        if key not in self._found:
            self._found[key] = _Kept(tensor.untyped_storage())
        offset = int(tensor.storage_offset())
        return _View(self._found[key], self._group, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def close(self) -> list[_Kept]:
        """The storages that were saved. From now on this object refers to none."""
        kept, self._found, self._shared, self._layer = list(self._found.values()), {}, (), None
        return kept


class Offloading:
    """Moves saved tensors. It owns the copy in progress, with its memory on both sides; the graph owns all others."""

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self.device, self.transfers = device, transfers
        self._num_moved = 0  # layers, the first ones
        self._checkpointed: frozenset[int] = frozenset()  # places of layers
        self._last: weakref.ref[_LayerCall] | None = None  # of the layer that ran last in forward
        self._leaving: tuple[_LayerCall, list[_Kept], Any] | None = None
        self._arriving: tuple[_LayerCall, list[_Kept], Any] | None = None

    def wrap(self, layers: Sequence[nn.Module]) -> None:
        """Put hooks around these layers. They go around compiled code, which then saves what it would.

        Args:
            layers: in the order in which they run; a layer inside another one moves with that.
        """
        for place, layer in enumerate(outermost(layers)):
            compiled: Any = layer._compiled_call_impl
            if compiled is not None:
                layer._compiled_call_impl = MethodType(self._around(place, compiled), layer)
            else:
                layer.forward = MethodType(self._around(place, layer.forward), layer)

    def move(self, num_layers: int, modes: Sequence[str], host_bytes: int = 0) -> None:
        """From the next forward pass on, move what the first layers save.

        Args:
            modes: of each layer that is in no other, as of `Checkpointing`.
            host_bytes: that their copies will take; the memory is made from now on, beside other work.
        """
        self._num_moved = num_layers
        self._checkpointed = frozenset(place for place, mode in enumerate(modes) if mode != "off")
        if num_layers:
            self.transfers.make_ahead(host_bytes)

    def _around(self, place: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # An evaluation saves nothing.
            if not (torch.is_grad_enabled() and 0 < self._num_moved >= place):
                return compute(*args, **kwargs)
            last = self._last() if self._last is not None else None
            # If the last layer that ran is not an earlier one, a new forward pass has begun.
            group = _LayerCall(place, last if last is not None and last.place < place else None)
            if place == self._num_moved:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Stays(tensor, group), self._unpack):
                    outputs = compute(*args, **kwargs)
                self._leave(group, [])
                return outputs
            only = own_input(args, kwargs) if place in self._checkpointed else None
            packing = _Packing(group, self.device, layer, [*shared_inputs(args, kwargs)], only)
            with torch.autograd.graph.saved_tensors_hooks(packing.pack, self._unpack):
                outputs = compute(*args, **kwargs)
            self._leave(group, packing.close())
            return outputs

        return call

    def _leave(self, group: _LayerCall, kept: list[_Kept]) -> None:
        """Free the previous layer's tensors on the device, and begin to copy this layer's."""
        self._receive()  # of a backward pass that was not finished
        self._settle(gives_up=True)
        copies, copied = self.transfers.to_host([one.storage for one in kept if one.storage is not None])
        for one, copy in zip(kept, copies, strict=True):
            one.copy = copy
        group.kept = [weakref.ref(one) for one in kept]
        self._leaving, self._last = (group, kept, copied), weakref.ref(group)

    def _settle(self, *, gives_up: bool) -> None:
        """Wait for the copy to the host.

        Args:
            gives_up: its device memory; False: backward begins with it.
        """
        if self._leaving is None:
            return
        group, kept, copied = self._leaving
        self.transfers.wait(copied)
        group.is_here = not gives_up
        for one in kept:
            one.storage = None if gives_up else one.storage
        self._leaving = None

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _View | _Stays):
            tensor: torch.Tensor = packed
            return tensor
        self._settle(gives_up=False)
        group = packed.group
        # The first tensor of a layer that backward asks for: its layer begins, so the one before it is brought back
        # now.
        if not group.is_used:
            group.is_used = True
            if not group.is_here:
                self._bring(group)
                self._receive()
            if group.before is not None:
                self._bring(group.before)
        return packed.tensor if isinstance(packed, _Stays) else packed.tensor()

    def _bring(self, group: _LayerCall) -> None:
        """Begin to copy a layer's tensors to the device, unless they are there or on their way."""
        if group.is_here or (self._arriving is not None and self._arriving[0] is group):
            return
        self._receive()
        kept = list(group.alive())
        storages, copied = self.transfers.to_device([one.copy for one in kept if one.copy is not None])
        for one, storage in zip(kept, storages, strict=True):
            one.storage = storage
        self._arriving = (group, kept, copied)

    def _receive(self) -> None:
        """Wait for the copy to the device."""
        if self._arriving is not None:
            group, kept, copied = self._arriving
            self.transfers.wait(copied)
            group.is_here = True
            for one in kept:
                one.copy = None
            self._arriving = None


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is moved, provided that it is neither a parameter or buffer of its layer nor shared."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == device.type
    return is_plain and tensor.untyped_storage().nbytes() >= MIN_BYTES


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def shared_inputs(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """A layer's other inputs: masks, positions, an encoder's output."""
    own = own_input(args, kwargs)
    yield from (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf is not own)


def own_input(args: Any, kwargs: Any) -> torch.Tensor | None:
    """A layer's own input: its first floating tensor."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)
