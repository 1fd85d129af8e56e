"""Host memory that a GPU copies from and to, pinned in exact sizes and faster than by torch.

torch pins each block on the thread that asks, and rounds its size up to a power of two (ATen's CachingHostAllocator.h).
Here all pages are found and cleared first, which several threads can do at once, and then registered with CUDA.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from utils.errors import in_one_line
from utils.local_tensors import local_tensor, plain_tensor

REGION_BYTES = 2**30
"""Of host memory that is pinned at once, by one of several threads."""

ALIGNED = 64  # tensors start at multiples of this, as torch's own do

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


def pinned_region(num_bytes: int) -> Region:
    """Pinned memory. Call it in a thread of its own: CUDA keeps the last error of each thread.

    Raises:
        OSError: ENOMEM, if the host has none, or may pin none.
    """
    if (region := _registered(_cleared_pages(num_bytes))) is not None:
        return region
    # A sandbox may not let user memory be pinned: torch asks the driver for its own, rounded up.
    try:
        return Region(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
    except RuntimeError as error:
        # CUDA's words for it are those for a full GPU, so its error would be reported as one.
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, pinned: {in_one_line(error)}") from None


def pinned_or_plain_region(num_bytes: int) -> Region:
    """The same, but plain memory if CUDA registers none: to it copies are slower, and it is never rounded up.

    Raises:
        OSError: ENOMEM, if the host has none.
    """
    memory = _cleared_pages(num_bytes)
    return _registered(memory) or Region(memory)


def _cleared_pages(num_bytes: int) -> torch.Tensor:
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # advice that a kernel may not take
        region.madvise(mmap.MADV_HUGEPAGE)  # 2 MiB at a time are found and locked faster
    with suppress(OSError):
        region.madvise(mmap.MADV_DONTFORK)  # a data loader's process must not share pages that the GPU writes
    memory = torch.frombuffer(region, dtype=torch.uint8)
    return memory.zero_()  # all pages are found and cleared here; pinning alone would do it on one core


def _registered(memory: torch.Tensor) -> Region | None:
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)):
        return None
    return Region(memory, lambda: cudart.cudaHostUnregister(memory.data_ptr()))


def region_maker(device: torch.device, make: Callable[[int], Region] = pinned_region) -> Callable[[int], Region]:
    """Makes host memory for copies of a device, in any thread.

    Args:
        make: for a GPU.
    """
    if device.type != "cuda":
        return plain_region

    def make_here(num_bytes: int) -> Region:
        with torch.cuda.device(device):  # of this thread
            return make(num_bytes)

    return make_here


def num_threads(local_world_size: int = 1) -> int:
    """How many threads a rank pins with.

    Args:
        local_world_size: ranks of this machine, which share its cores.
    """
    return max(1, min(NUM_THREADS, len(os.sched_getaffinity(0)) // local_world_size))


class TensorsOnHost:
    """Empty tensors like some others, in host memory and sharded alike.

    They lie side by side in a few regions, so none is rounded up.
    """

    @torch.no_grad()
    def __init__(self, originals: Iterable[torch.Tensor], make_region: Callable[[int], Region]) -> None:
        self.tensors = [torch.empty_like(plain_tensor(original), device="cpu") for original in originals]
        places, sizes = list[tuple[int, int]](), [0]
        for local in map(local_tensor, self.tensors):
            if sizes[-1] >= REGION_BYTES:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += -(-local.nbytes // ALIGNED) * ALIGNED
        with ThreadPoolExecutor(num_threads()) as executor:
            self._regions = [*executor.map(make_region, (max(size, ALIGNED) for size in sizes))]
        weakref.finalize(self, _release, self._regions).atexit = False
        for tensor, (region, start) in zip(self.tensors, places, strict=True):
            local = local_tensor(tensor)
            storage = self._regions[region].memory.untyped_storage()
            local.set_(storage, start // local.element_size(), local.size(), local.stride())


def _release(regions: list[Region]) -> None:
    for region in regions:
        region.release()
