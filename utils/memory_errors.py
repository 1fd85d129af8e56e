"""Which errors mean that memory has run out, and the figures in torch's text of them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

_DEVICE_WORDS = re.compile(
    # the allocator; CUDA itself, which NCCL and bitsandbytes quote; cuBLAS, cuDNN and their like
    r"(CUDA|HIP)( driver)? (error: )?out of memory|Cuda failure (\d+ )?'out of memory'|cudaErrorMemoryAllocation"
    r"|CU[A-Z]+_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_HOST_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory"
    r"|DataLoader worker \(pid \d+\) is killed by signal: Killed"
)
_TOLD_BY_OTHERS = "rank 0 failed: "  # `ranks.collectives.on_rank_zero`: that rank speaks itself
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, the latest first."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def what_ran_out(error: BaseException) -> Literal["device", "host"] | None:
    """Whose memory ran out, if the error says that some did."""
    for cause in causes(error):
        text = str(cause)
        if text.startswith(_TOLD_BY_OTHERS):
            return None
        if isinstance(cause, torch.OutOfMemoryError):
            return "device"
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return "host"
        if isinstance(cause, RuntimeError):
            if _DEVICE_WORDS.search(text):
                return "device"
            if _HOST_WORDS.search(text):
                return "host"
    return None


@dataclass(frozen=True)
class AllocatorFigures:
    """Figures of torch's allocator at the moment when memory ran out, in bytes; None if its text lacks one."""

    asked: int | None = None
    capacity: int | None = None  # of the device, or what this process is allowed of it
    free: int | None = None
    this_process: int | None = None  # with the CUDA context and NCCL's and other libraries' memory
    other_processes: int | None = None
    allocated: int | None = None
    unused: int | None = None  # reserved by torch, but not allocated

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unused is None else self.allocated + self.unused

    @property
    def needed(self) -> int | None:
        """What was allocated and asked for, together."""
        return None if self.allocated is None else self.allocated + (self.asked or 0)

    @property
    def room(self) -> int | None:
        """All that torch may reserve: the device less other processes, the driver, and a limit of this process."""
        if self.capacity is None or self.reserved is None or self.free is None:
            return self.capacity
        return min(self.capacity, self.reserved + self.free)


EXPANDABLE_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""The environment in which torch's allocator lets segments grow, which keeps memory from falling to pieces."""


def grows_segments() -> bool:
    """Whether torch's allocator was told so."""
    told = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return any("expandable_segments:true" in text.lower().replace(" ", "") for text in told)


def allocator_figures(error: BaseException) -> AllocatorFigures:
    """The figures in the text of the error, as `c10/cuda/CUDACachingAllocator.cpp` writes it."""
    text = next((str(cause) for cause in causes(error) if "Tried to allocate" in str(cause)), "")
    capacities = [_size(rf"total capacity of {_SIZE}", text), _size(rf"{_SIZE} allowed", text)]
    others = [_bytes(*found) for found in re.findall(rf"Process \d+ has {_SIZE} memory in use", text)]
    return AllocatorFigures(
        asked=_size(rf"Tried to allocate {_SIZE}", text),
        capacity=min((size for size in capacities if size is not None), default=None),
        free=_size(rf"of which {_SIZE} is free", text),
        this_process=_size(rf"this process has {_SIZE} memory in use", text),
        other_processes=sum(others) if "memory in use" in text else None,
        allocated=_size(rf"Of the allocated memory {_SIZE} is allocated by PyTorch", text),
        unused=_size(rf"{_SIZE} is reserved by PyTorch but unallocated", text),
    )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(*found.groups()) if found else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
