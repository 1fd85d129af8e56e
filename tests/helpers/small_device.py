"""A device with little memory, in place of a GPU: what tensors of this process take is counted, and limited.

Torch's dispatcher shows every operation of the process. Storages that operations made and that are still there count
as allocated. If they are more than the limit, the operation raises torch.OutOfMemoryError in the words of torch's CUDA
allocator.

    python -m tests.helpers.small_device LIMIT_GIB finetuning.py FLAGS

runs the script on such a device; a limit of 0 is none.
"""

from __future__ import annotations

import math
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import finetuning
from reporting.memory_ledger import MemoryLedger
from utils.units import GIB

MIB = 2**20


class SmallDevice(TorchDispatchMode):
    """A context in which operations of this thread count what they allocate.

    Args:
        limit: in bytes.
        unused: bytes that the allocator has reserved and cannot use, in pieces too small.
    """

    def __init__(self, limit: float = math.inf, *, unused: int = 0) -> None:
        super().__init__()
        self.limit, self.unused, self.peak = limit, unused, 0
        self.storages: dict[int, weakref.ref[Any]] = {}

    def figures(self, ledger: MemoryLedger) -> tuple[int, int, float, int]:
        """In place of `MemoryLedger.allocator`."""
        allocated = self.allocated()
        return allocated, self.peak, float(allocated + self.unused), 0

    def allocated(self) -> int:
        """Bytes of all storages that are still there; sharded weights give theirs back by resizing them."""
        alive = (ref() for ref in list(self.storages.values()))
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the tensors that this rank holds
        result = func(*args, **(kwargs or {}))
        asked = 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if id(storage) not in self.storages:
                    self.storages[id(storage)] = weakref.ref(storage, partial(self._freed, id(storage)))
                    asked += storage.nbytes()
        if asked:
            now = self.allocated()
            if now + self.unused > self.limit:
                message, self.limit = self._message(asked, now - asked), math.inf  # what follows is the host's
                raise torch.OutOfMemoryError(message)
            self.peak = max(self.peak, now)
        return result

    def _freed(self, key: int, _: Any) -> None:
        self.storages.pop(key, None)

    def _message(self, asked: int, allocated: int) -> str:
        """As c10/cuda/CUDACachingAllocator.cpp writes it."""
        free = max(0, int(self.limit) - allocated - self.unused)
        return (
            f"CUDA out of memory. Tried to allocate {asked / MIB:.2f} MiB. GPU 0 has a total capacity of "
            f"{self.limit / MIB:.2f} MiB of which {free / MIB:.2f} MiB is free. Process 77 has 1.50 MiB memory in use. "
            f"Including non-PyTorch memory, this process has {(allocated + self.unused) / MIB:.2f} MiB memory in use. "
            f"Of the allocated memory {allocated / MIB:.2f} MiB is allocated by PyTorch, and {self.unused / MIB:.2f} "
            "MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def on_small_device(
    argv: Sequence[str], limit_gib: float = 0.0, *, unused: int = 0, rank: int | None = None
) -> Callable[[], int]:
    """What `ProcessGroup.run` runs instead of the flags.

    Args:
        limit_gib: 0 is none. rank: the one whose device is so small; None: all.
    """
    return partial(_train, tuple(argv), limit_gib, unused, rank)


def _train(argv: Sequence[str], limit_gib: float, unused: int, rank: int | None) -> int:
    sys.argv[0] = str(finetuning.__file__)  # part of the commands that the account suggests
    is_limited = limit_gib and rank in (None, int(os.environ.get("RANK", "0")))
    with small_device(SmallDevice(limit_gib * GIB if is_limited else math.inf, unused=unused)):
        status = finetuning.main(argv)
    if status:
        finetuning.leave(status)  # as finetuning.py does
    return status


def small_device(device: SmallDevice) -> SmallDevice:
    """The device, once this process's ledger asks it."""
    MemoryLedger.has_allocator = property(lambda ledger: True)  # type: ignore[assignment,method-assign]
    MemoryLedger.allocator = lambda ledger: device.figures(ledger)  # type: ignore[method-assign]
    return device


if __name__ == "__main__":
    limit_gib = float(sys.argv[1])
    sys.argv = sys.argv[2:]
    with small_device(SmallDevice(limit_gib * GIB if limit_gib else math.inf)):
        runpy.run_path(sys.argv[0], run_name="__main__")
