"""Counts the bytes of tensors that are alive while code runs on the meta device, where tensors have shapes only.

Autograd keeps the same tensors there as on a GPU, so a forward and a backward pass on meta tensors give the memory of a
GPU. Kernels of attention are the exception: the meta device has none of them (`planning.memory.device_kernels`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    uncast: int = 0  # as `peak`, without copies in another dtype, which compiled code does not write
    uncast_with_grads: int = 0  # as `peak_with_grads`, without them
    first: Window | None = None  # the part before `LiveBytes.divide`; the peaks are then those of the rest

    def parts(self) -> list[Window]:
        return [self] if self.first is None else [self.first, self]


class LiveBytes(TorchDispatchMode):
    """Counts new storages from when an operator returns them until the last reference is gone."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """
        Args:
            existing: parameters, buffers and inputs; neither they nor their views are counted.
        """
        super().__init__()
        self._sizes: dict[int, tuple[int, bool, Any]] = {}  # by storage: its bytes, whether it is a copy in a dtype
        self._existing = {tensor.untyped_storage()._cdata: tensor for tensor in existing}
        self.live = 0
        self.uncast = 0  # of these, all but copies in another dtype
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
        live, uncast, grads = self.live, self.uncast, self._grads
        return Window(live, live, live, live + grads, uncast=uncast, uncast_with_grads=uncast + grads)

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
        size, *_ = self._sizes.get(tensor.untyped_storage()._cdata, (0,))
        return size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, is_cast=function is torch.ops.aten._to_copy.default)
        if function is EXPERTS_PRODUCT:  # it gives up the weights that it unpacks before it returns
            unpacked = unpacked_bytes(*args)
            self.window.unpacked = max(self.window.unpacked, unpacked)
            self._note_peak(unpacked)
        elif temporary := temporary_bytes(function, args):
            self._note_peak(temporary)
        return outputs

    def _count(self, tensor: torch.Tensor, *, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A view shares its storage, which is counted once.
        if key in self._sizes or key in self._existing:
            return
        size = storage.nbytes()

        # torch keeps one Python object for a storage as long as the storage lives, so the callback tells its end.
        self._sizes[key] = (size, is_cast, weakref.ref(storage, lambda _: self._forget(key)))
        self.live += size
        self.uncast += 0 if is_cast else size
        self._note_peak()

    def _forget(self, key: int) -> None:
        size, is_cast, _ = self._sizes.pop(key, (0, False, None))
        self.live -= size
        self.uncast -= 0 if is_cast else size

    def _note_peak(self, more: int = 0) -> None:
        """The bytes alive may be the most so far, with `more` that are there for a moment."""
        window, live, uncast = self.window, self.live + more, self.uncast + more
        window.peak = max(window.peak, live)
        window.peak_with_grads = max(window.peak_with_grads, live + self._grads)
        window.uncast = max(window.uncast, uncast)
        window.uncast_with_grads = max(window.uncast_with_grads, uncast + self._grads)
