"""Counts the bytes of tensors that are alive while code runs on the meta device, where tensors have shapes only.

Autograd keeps the same tensors there as on a GPU, so a forward and a backward pass on meta tensors give the memory of a
GPU. Kernels of attention are the exception: the meta device has none of them (`planning.memory.device_kernels`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.linear_attention.delta_rule_kernel import temporary_bytes
from policies.quantization.quantized_experts import EXPERTS_PRODUCT, unpacked_bytes


@dataclass
class Window:
    """A part of the pass, from one `LiveBytes.enter` to the next, in bytes."""

    start: int = 0  # alive when it began
    end: int = 0  # alive when it ended
    peak: int = 0  # most alive meanwhile, without gradients of parameters
    peak_with_grads: int = 0  # the same, with the gradients that came in this window
    unpacked: int = 0  # the most that a product of experts unpacked for itself; part of the peaks
    written: int = 0  # as `peak`, of what compiled code writes
    written_with_grads: int = 0  # as `peak_with_grads`, of that
    first: Window | None = None  # the part before `LiveBytes.divide`; the peaks are then those of the rest

    def parts(self) -> list[Window]:
        return [self] if self.first is None else [self.first, self]


@dataclass
class _Storage:
    size: int  # bytes; 0 when it is gone
    is_written: bool
    copies: list[_Storage] = field(default_factory=list)  # of its tensor, in another dtype
    end: Any = None  # the weak reference whose callback forgets it


class LiveBytes(TorchDispatchMode):
    """Counts new storages from when an operator returns them until the last reference is gone.

    What compiled code writes of them is counted apart: no copy in another dtype of a tensor that is still there, since
    it casts where it reads, and no mask of adapters' dropout, which it computes from keys.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """
        Args:
            existing: parameters, buffers and inputs; neither they nor their views are counted.
        """
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._existing = {tensor.untyped_storage()._cdata: tensor for tensor in existing}
        self.live = 0
        self.written = 0  # of these, what compiled code writes
        self._grads = 0
        self.window = Window()

    def enter(self) -> Window:
        """Close the window and open the next, which is returned."""
        self.window.end = self.live
        self._grads = 0
        self.window = self._begun()
        return self.window

    def divide(self) -> None:
        """Begin the second part of the window; if it has one, nothing is done."""
        if self.window.first is None:
            # The window's owner has this object, so it goes on, and its first part is a copy.
            self.window.first = replace(self.window)
            vars(self.window).update(vars(self._begun()) | {"first": self.window.first})

    def _begun(self) -> Window:
        live, written, grads = self.live, self.written, self._grads
        return Window(live, live, live, live + grads, written=written, written_with_grads=written + grads)

    def take_grad(self, parameter: torch.Tensor) -> None:
        """A hook of parameters: their gradients are counted apart, and dropped."""
        gradient = parameter.grad
        if gradient is None:
            return
        self._forget(gradient.untyped_storage()._cdata)
        self._grads += gradient.nbytes
        parameter.grad = None

    def size_of(self, tensor: torch.Tensor) -> int:
        """The bytes that are counted for a tensor; 0 if it was there before."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found.size if found else 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        source = args[0] if function is torch.ops.aten._to_copy.default else None
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                # Made so by policies/adapters/dropout_masks.py.
                is_mask = function is torch.ops.aten.empty_like.default and leaf.dtype == torch.bool
                self._count(leaf, source, is_mask=is_mask)
        if function is EXPERTS_PRODUCT:  # it gives up the weights that it unpacks before it returns
            unpacked = unpacked_bytes(*args)
            self.window.unpacked = max(self.window.unpacked, unpacked)
            self._note_peak(unpacked)
        elif temporary := temporary_bytes(function, args):
            self._note_peak(temporary)
        return outputs

    def _count(self, tensor: torch.Tensor, source: torch.Tensor | None, *, is_mask: bool) -> None:
        """Count a new storage.

        Args:
            source: what the tensor is a copy of, in another dtype.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A view shares its storage, which is counted once.
        if key in self._storages or key in self._existing:
            return
        counted = _Storage(storage.nbytes(), is_written=source is None and not is_mask)
        # torch keeps one Python object for a storage as long as the storage lives, so the callback tells its end.
        counted.end = weakref.ref(storage, lambda _: self._forget(key))
        self._storages[key] = counted
        of_source = None if source is None else self._storages.get(source.untyped_storage()._cdata)
        if of_source:
            of_source.copies.append(counted)
        self.live += counted.size
        self.written += counted.size if counted.is_written else 0
        self._note_peak()

    def _forget(self, key: int) -> None:
        gone = self._storages.pop(key, None)
        if gone is None:
            return
        self.live -= gone.size
        self.written -= gone.size if gone.is_written else 0
        gone.size = 0
        for copy in gone.copies:  # nothing else has its values now
            self.written += 0 if copy.is_written else copy.size
            copy.is_written = True

    def _note_peak(self, more: int = 0) -> None:
        """The bytes alive may be the most so far, with `more` that are there for a moment."""
        window, live, written = self.window, self.live + more, self.written + more
        window.peak = max(window.peak, live)
        window.peak_with_grads = max(window.peak_with_grads, live + self._grads)
        window.written = max(window.written, written)
        window.written_with_grads = max(window.written_with_grads, written + self._grads)
