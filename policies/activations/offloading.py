"""Activation offloading: layers' saved tensors wait in host memory, and come back before backward needs them.

With layers checkpointed as `full` that is the input of each layer. Copies have a stream of their own:

| when                      | the stream that computes               | the stream that copies                   |
|---------------------------|----------------------------------------|------------------------------------------|
| layer n's forward ends    | waits for n - 1's copy; what n - 1     | waits for layer n; copies what it keeps  |
|                           | keeps is given up on the device        | to the host, while layer n + 1 computes  |
| layer n's backward begins | waits until what n keeps is back       | waits for computing so far; brings back  |
|                           |                                        | what n - 1 keeps, while layer n computes |

So the device holds what two layers keep. Device memory is given back only after the stream that computes was told to
wait for the copy that reads or writes it: whatever takes that memory next runs on this stream, and so after the copy.

Parameters and buffers stay where they are, and so do small tensors and what a layer shares with others, such as masks.
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
"""Of a storage, to be moved: below this the copy takes longer to start than to run."""


class Transfers(Protocol):
    """Copies storages between a device and host memory."""

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        """Copies of the storages, and what to wait for before they are whole, and before the storages may go."""

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        """The storages of these copies, and what to wait for before they are whole, and before they may go."""

    def wait(self, copied: Any) -> None:
        """Make all later computation wait for these copies."""


class StreamTransfers:
    """Copies on a stream of their own, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            copies = [torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=True) for s in storages]
            for copy, storage in zip(copies, storages, strict=True):
                copy.copy_(_bytes_of(storage), non_blocking=True)
        return copies, self.stream.record_event()

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        # Allocated for the stream that computes, where they are used and given back.
        arriving = [torch.empty_like(copy, device=self.device) for copy in copies]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for tensor, copy in zip(arriving, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        return [tensor.untyped_storage() for tensor in arriving], self.stream.record_event()

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(copied)


class HostTransfers:
    """The same where the device is the host: copies that are made at once."""

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        return [_bytes_of(storage).clone() for storage in storages], None

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        return [copy.clone().untyped_storage() for copy in copies], None

    def wait(self, copied: Any) -> None: ...


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def offload_activations(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Let what each layer keeps wait in host memory. The layers may be compiled and sharded already.

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
    """What one call of a layer keeps. Autograd's graph owns it, so it goes as backward goes on."""

    place: int
    before: _LayerCall | None
    kept: list[weakref.ref[_Kept]] = field(default_factory=list)
    is_here: bool = False  # on the device, for backward
    is_used: bool = False  # by backward

    def alive(self) -> Iterator[_Kept]:
        yield from (kept for ref in self.kept if (kept := ref()) is not None)


@dataclass(eq=False)
class _View:
    """A tensor that autograd keeps, as it looks at a storage."""

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
    """What one call of a layer has kept so far. Autograd's graph holds it, for its method, so it has to let go."""

    def __init__(
        self, group: _LayerCall, device: torch.device, layer: nn.Module, shared: Sequence[torch.Tensor]
    ) -> None:
        self._group, self._device = group, device
        self._layer: nn.Module | None = layer
        self._shared = shared
        self._stays: set[int] = set()
        self._found: dict[int, _Kept] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._layer is not None:  # not before: sharded weights are whole inside the layer's forward
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
        """What was kept. No more is kept from now on."""
        kept, self._found, self._shared, self._layer = list(self._found.values()), {}, (), None
        return kept


class Offloading:
    """Moves what layers keep. It owns a copy that is under way, with its memory on both sides; the graph all others."""

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self.device, self.transfers = device, transfers
        self._last: weakref.ref[_LayerCall] | None = None  # of the layer that ran last in forward
        self._leaving: tuple[_LayerCall, list[_Kept], Any] | None = None
        self._arriving: tuple[_LayerCall, list[_Kept], Any] | None = None

    def wrap(self, layers: Sequence[nn.Module]) -> None:
        """Move what these layers keep, each outside its compiled code."""
        inside = {id(module) for layer in layers for module in layer.modules() if module is not layer}
        for place, layer in enumerate(layer for layer in layers if id(layer) not in inside):
            compiled: Any = layer._compiled_call_impl
            if compiled is not None:
                layer._compiled_call_impl = MethodType(self._around(place, compiled), layer)
            else:
                layer.forward = MethodType(self._around(place, layer.forward), layer)

    def _around(self, place: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            last = self._last() if self._last is not None else None
            group = _LayerCall(place, last if last is not None and last.place < place else None)
            packing = _Packing(group, self.device, layer, [*shared_inputs(args, kwargs)])
            with torch.autograd.graph.saved_tensors_hooks(packing.pack, self._unpack):
                outputs = compute(*args, **kwargs)
            self._leave(group, packing.close())
            return outputs

        return call

    def _leave(self, group: _LayerCall, kept: list[_Kept]) -> None:
        """Give up what the layer before keeps on the device, and begin to copy what this one keeps."""
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
        if not group.is_used:
            group.is_used = True
            if not group.is_here:
                self._bring(group)
                self._receive()
            if group.before is not None:
                self._bring(group.before)
        return packed.tensor()

    def _bring(self, group: _LayerCall) -> None:
        """Begin to copy what a layer keeps to the device, unless it is there or on its way."""
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
    """Whether a tensor that autograd keeps is moved, unless it is the layer's own or shared with others."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == device.type
    return is_plain and tensor.untyped_storage().nbytes() >= MIN_BYTES


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def shared_inputs(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """A layer's other inputs: masks, positions, an encoder's output. Its own input is the first floating tensor."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    own = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    yield from (tensor for tensor in tensors if tensor is not own)
