"""Host memory for copies of tensors, pinned once and used again by every step.

Pinning is slow: the kernel finds, clears and locks each page, so doing it for each copy would take longer than the
copies. Here a copy takes as many pages of PAGE_BYTES as it needs, anywhere in the pool, so
rows of all lengths share them and at most one page per copy is not full.

Threads make the pool in chunks, before the first step and while it computes; a copy waits only for the chunks it needs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from policies.pinned_memory import Region
from utils.errors import RunError, in_one_line
from utils.units import GIB

PAGE_BYTES = 4 * 2**20
"""A copy of this size takes 80 us over PCIe 5, longer than it takes to start one."""

CHUNK_BYTES = 2**28
PAGES_PER_CHUNK = CHUNK_BYTES // PAGE_BYTES


class HostMemoryError(RunError):
    """Host memory for copies could not be had."""


class HostBlock:
    """Pages of a pool that hold one copy. They go back when this object goes."""

    def __init__(self, pool: HostPool, pages: list[torch.Tensor], num_bytes: int) -> None:
        self._pool, self._pages, self.num_bytes = pool, pages, num_bytes

    def beside(self, contents: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each page, as far as it is used, with its part of `contents`, `[num_bytes]` of uint8."""
        for page, part in zip(self._pages, contents.split(PAGE_BYTES), strict=True):
            yield page[: len(part)], part

    def __del__(self) -> None:
        self._pool.give_back(self._pages)


class HostPool:
    """Pages of host memory. It grows when it lacks pages, and is given up with its last reference."""

    def __init__(self, make_region: Callable[[int], Region], num_threads: int = 1) -> None:
        """
        Args:
            make_region: called in threads of the pool.
            num_threads: that make chunks at once.
        """
        self._make_region = make_region
        self._free: deque[torch.Tensor] = deque()
        self._arrival = threading.Condition()
        self._num_coming = 0  # chunks
        self._error: BaseException | None = None
        self._began = 0.0
        self._chunks: list[Region] = []
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="host-pool")
        # Not at exit: the process's end frees all, and a device that hangs would hold it up.
        weakref.finalize(self, _release, self._chunks, self._threads).atexit = False
        self.making_seconds = 0.0  # from the first order to the last arrival so far
        self.waited_seconds = 0.0  # by those who took pages

    @property
    def num_bytes(self) -> int:
        return len(self._chunks) * CHUNK_BYTES

    def make_ahead(self, num_bytes: int) -> None:
        """Begin to make at least so many bytes, in threads."""
        with self._arrival:
            self._order(-(-num_bytes // CHUNK_BYTES) - len(self._chunks) - self._num_coming)

    def take(self, num_bytes: int) -> HostBlock:
        """Pages for a copy of so many bytes; waits until they are there.

        Raises:
            HostMemoryError: if the memory could not be had.
        """
        num_pages = -(-num_bytes // PAGE_BYTES)
        if len(self._free) < num_pages:
            began = time.perf_counter()
            self._wait_for(num_pages)
            self.waited_seconds += time.perf_counter() - began
        # One at a time: a block that the garbage collector frees meanwhile gives its pages back in between.
        return HostBlock(self, [self._free.pop() for _ in range(num_pages)], num_bytes)

    def give_back(self, pages: list[torch.Tensor]) -> None:
        # The last one first, so that the next block of this size gets them in the same order.
        self._free.extend(reversed(pages))

    def _wait_for(self, num_pages: int) -> None:
        with self._arrival:
            while len(self._free) < num_pages:
                if self._error is not None:
                    had, why = f"{self.num_bytes / GIB:.1f} GiB", in_one_line(self._error)
                    raise HostMemoryError(
                        f"--activation_offloading: no host memory could be pinned beyond {had} ({why}); give "
                        "--num_offloaded_layers fewer layers"
                    ) from self._error
                missing = num_pages - len(self._free) - self._num_coming * PAGES_PER_CHUNK
                self._order(-(-missing // PAGES_PER_CHUNK))
                self._arrival.wait()

    def _order(self, num_chunks: int) -> None:
        self._began = self._began or time.perf_counter()
        for _ in range(num_chunks):
            self._num_coming += 1
            self._threads.submit(_deliver, weakref.ref(self), self._make_region)

    def arrive(self, chunk: Region | None, error: BaseException | None) -> None:
        """A chunk is there, or cannot be had."""
        with self._arrival:
            self._num_coming -= 1
            self._error = error or self._error
            if chunk is not None:
                self._chunks.append(chunk)
                self._free.extend(chunk.memory.split(PAGE_BYTES))
            self.making_seconds = time.perf_counter() - self._began
            self._arrival.notify_all()


def pool_bytes(num_bytes: int) -> int:
    """Host memory that pages for one copy of `num_bytes` take."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def chunk_bytes(num_bytes: int) -> int:
    """Host memory of a pool whose copies take `num_bytes` at once, as `pool_bytes` gives them."""
    return -(-num_bytes // CHUNK_BYTES) * CHUNK_BYTES


def _deliver(pool: weakref.ref[HostPool], make_region: Callable[[int], Region]) -> None:
    chunk, error = None, None
    if pool() is None:
        return
    try:
        chunk = make_region(CHUNK_BYTES)
    except BaseException as raised:  # the thread that waits raises it
        error = raised
    if (alive := pool()) is not None:
        alive.arrive(chunk, error)
    elif chunk is not None:
        chunk.release()


def _release(chunks: list[Region], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for chunk in chunks:
        chunk.release()
