"""Which errors mean that memory ran out, and the figures in the words of torch's allocator."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import torch

from utils.memory_errors import AllocatorFigures, allocator_figures, what_ran_out

GIB = 2**30
# As torch 2.4 writes it (c10/cuda/CUDACachingAllocator.cpp), on a device of which this process may take a part.
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 31.73 GiB of which 3.44 GiB is "
    "free. Process 4711 has 2.00 GiB memory in use. Process 12 has 512.00 MiB memory in use. Including non-PyTorch "
    "memory, this process has 25.50 GiB memory in use. 24.00 GiB allowed; Of the allocated memory 22.50 GiB is "
    "allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), and 1.25 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (torch.OutOfMemoryError(CUDA), "device"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\nLast error:\nCuda failure 2 'out of "
                "memory'"
            ),
            "device",
        ),
        (ValueError("CUDA out of memory"), None),
        (RuntimeError("rank 0 failed: OutOfMemoryError: CUDA out of memory."), None),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you"), "host"),
        (RuntimeError("DataLoader worker (pid 231) is killed by signal: Killed. "), "host"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (raised(RuntimeError("in a hook"), torch.OutOfMemoryError("CUDA out of memory.")), "device"),
    ],
)
def test_whose_memory_ran_out(error: BaseException, whose: str | None) -> None:
    assert what_ran_out(error) == whose


def test_the_allocators_figures_are_read() -> None:
    figures = allocator_figures(raised(RuntimeError("in a hook"), torch.OutOfMemoryError(CUDA)))
    assert figures == AllocatorFigures(
        asked=20 * 2**20,
        capacity=24 * GIB,
        free=round(3.44 * GIB),
        this_process=round(25.5 * GIB),
        other_processes=round(2.5 * GIB),
        allocated=round(22.5 * GIB),
        unused=round(1.25 * GIB),
    )
    assert figures.reserved == round(23.75 * GIB)
    assert figures.room == 24 * GIB, "the limit is one of torch's allocator; 3.44 GiB more are free on the device"
    assert replace(figures, free=GIB // 8).room == round(23.875 * GIB), "others have the rest"
    assert allocator_figures(RuntimeError("CUDA error: out of memory")) == AllocatorFigures()
