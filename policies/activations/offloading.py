"""Activation offloading: layers' saved tensors wait in host memory, and come back before backward needs them.

With layers checkpointed as `full` that is the input of each layer. Copies have a stream of their own:

| when                      | the stream that computes               | the stream that copies                   |
|---------------------------|----------------------------------------|------------------------------------------|
| layer n's forward ends    | waits for n - 1's copy; frees the      | waits for layer n; copies its tensors to |
|                           | tensors of n - 1 on the device         | the host, while layer n + 1 computes     |
| layer n's backward begins | waits until n's tensors are back       | waits for computing so far; brings back  |
|                           |                                        | those of n - 1, while layer n computes   |

So the device holds the saved tensors of two layers. Device memory is freed only after the computing stream was told to
wait for the copy that reads or writes it: the next user of that memory runs on this stream, and so after the copy.

Parameters, buffers, small tensors, and tensors that layers share, such as masks, stay on the device.
A storage is copied once, however many views of it are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from utils.local_tensors import local_tensor

MIN_BYTES = 2**20
"""Smallest storage to be moved: below this the copy takes longer to start than to run."""


class Transfers(Protocol):
    """Copies storages between a device and host memory."""

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        """Copies of the storages, and a handle: once it was waited for, they are whole and storages may be freed."""

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        """Storages with these copies, and a handle: once it was waited for, they are whole and copies may be freed."""

    def wait(self, copied: Any) -> None:
        """Make all later computation wait for these copies."""


class StreamTransfers:
    """Copies on a stream of their own, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        # The kernels that write these tensors are queued on the computing stream.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copies = [torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=True) for s in storages]
            for copy, storage in zip(copies, storages, strict=True):
                copy.copy_(_bytes_of(storage), non_blocking=True)
        return copies, self.stream.record_event()

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        # Allocated for the stream that computes, where they are used and given back.
        arriving = [torch.empty_like(copy, device=self.device) for copy in copies]
        # The memory of `arriving` may still be used by kernels queued before.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for tensor, copy in zip(arriving, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        return [tensor.untyped_storage() for tensor in arriving], self.stream.record_event()

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(copied)


class HostTransfers:
    """The same if the device is the host: copies are made at once."""

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        return [_bytes_of(storage).clone() for storage in storages], None

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        return [copy.clone().untyped_storage() for copy in copies], None

    def wait(self, copied: Any) -> None: ...


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def offload_activations(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Move the tensors that layers save for backward to host memory. The layers may be compiled and sharded already.

    Args:
        layers: in the order in which they run; a layer inside another one moves with that.
        device: that computes.
    """
    transfers: Transfers = StreamTransfers(device) if device.type == "cuda" else HostTransfers()
    Offloading(device, transfers).wrap(layers)


@dataclass(eq=False)
class _Kept:
    """The bytes of one storage: on the device, in host memory, or in both."""

    storage: torch.UntypedStorage | None
    copy: torch.Tensor | None = None


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


class _Packing:
    """Collects the saved tensors of one call of a layer.

    Autograd's graph holds its method `pack`, and with it this object, so close() drops its references.
    """

    def __init__(
        self, group: _LayerCall, device: torch.device, layer: nn.Module, shared: Sequence[torch.Tensor]
    ) -> None:
        self._group, self._device = group, device
        self._layer: nn.Module | None = layer
        self._shared = shared
        self._stays: set[int] = set()
        self._found: dict[int, _Kept] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._layer is not None:  # at the first call: inside the layer's forward, where sharded weights are whole
            own = (local_tensor(tensor) for tensor in (*self._layer.parameters(), *self._layer.buffers()))
            self._stays, self._layer = {key_of(tensor) for tensor in (*own, *self._shared)}, None
        key = key_of(tensor) if is_movable(tensor, self._device) else None
        if key is None or key in self._stays:
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
        self._last: weakref.ref[_LayerCall] | None = None  # of the layer that ran last in forward
        self._leaving: tuple[_LayerCall, list[_Kept], Any] | None = None
        self._arriving: tuple[_LayerCall, list[_Kept], Any] | None = None

    def wrap(self, layers: Sequence[nn.Module]) -> None:
        """Move the saved tensors of these layers. The hooks go around compiled code, which then saves what it would."""
        inside = {id(module) for layer in layers for module in layer.modules() if module is not layer}
        for place, layer in enumerate(layer for layer in layers if id(layer) not in inside):
            compiled: Any = layer._compiled_call_impl
            if compiled is not None:
                layer._compiled_call_impl = MethodType(self._around(place, compiled), layer)
            else:
                layer.forward = MethodType(self._around(place, layer.forward), layer)

    def _around(self, place: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # An evaluation saves nothing.
            if not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            last = self._last() if self._last is not None else None
            # If the last layer that ran is not an earlier one, a new forward pass has begun.
            group = _LayerCall(place, last if last is not None and last.place < place else None)
            packing = _Packing(group, self.device, layer, [*shared_inputs(args, kwargs)])
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
        if not isinstance(packed, _View):
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
        return packed.tensor()

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
    """A layer's other inputs: masks, positions, an encoder's output. Its own input is the first floating tensor."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    own = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    yield from (tensor for tensor in tensors if tensor is not own)
