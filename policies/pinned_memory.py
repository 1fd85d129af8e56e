"""Host memory that a GPU copies from and to, pinned in exact sizes and faster than by torch.

torch pins each block on the thread that asks, and rounds its size up to a power of two (ATen's CachingHostAllocator.h).
Here all pages are found and cleared first, which several threads can do at once, and then registered with CUDA.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from utils.errors import in_one_line

NUM_THREADS = 8
"""That pin at once, at most; more wait for the kernel's locks."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts


class Region:
    """Some bytes of host memory, and what gives them back."""

    def __init__(self, memory: torch.Tensor, release: Callable[[], Any] = lambda: None) -> None:
        self.memory, self.release = memory, release


def plain_region(num_bytes: int) -> Region:
    """Memory as it comes: for a device that is the host."""
    return Region(torch.empty(num_bytes, dtype=torch.uint8))


def cleared_pages(num_bytes: int) -> torch.Tensor:
    """Memory whose pages are found and cleared, as uint8: pinning alone would do that on one core.

    Raises:
        OSError: ENOMEM, if the host has none.
    """
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # advice that a kernel may not take
        region.madvise(mmap.MADV_HUGEPAGE)  # 2 MiB at a time are found and locked faster
    with suppress(OSError):
        region.madvise(mmap.MADV_DONTFORK)  # a data loader's process must not share pages that the GPU writes
    return torch.frombuffer(region, dtype=torch.uint8).zero_()


def pinned_pages(memory: torch.Tensor) -> Region | None:
    """These pages, pinned; None if CUDA pins none. Call it in a thread of its own: CUDA keeps the last error of each
    thread."""
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)):
        return None
    return Region(memory, lambda: cudart.cudaHostUnregister(memory.data_ptr()))


def pinned_region(num_bytes: int) -> Region:
    """Pinned memory. Call it in a thread of its own, as `pinned_pages`.

    Raises:
        OSError: ENOMEM, if the host has none, or may pin none.
    """
    if (region := pinned_pages(cleared_pages(num_bytes))) is not None:
        return region
    # A sandbox may not let user memory be pinned: torch asks the driver for its own, rounded up.
    try:
        return Region(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
    except RuntimeError as error:
        # CUDA's words for it are those for a full GPU, so its error would be reported as one.
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, pinned: {in_one_line(error)}") from None


def region_maker(device: torch.device) -> Callable[[int], Region]:
    """Makes host memory for copies of a device, in any thread."""
    if device.type != "cuda":
        return plain_region

    def make(num_bytes: int) -> Region:
        with torch.cuda.device(device):  # of this thread
            return pinned_region(num_bytes)

    return make


def num_threads(local_world_size: int = 1) -> int:
    """How many threads a rank pins with.

    Args:
        local_world_size: ranks of this machine, which share its cores.
    """
    return max(1, min(NUM_THREADS, len(os.sched_getaffinity(0)) // local_world_size))
