"""How fast host memory is pinned, and how fast activations are copied to it and back.

    python -m benchmarks.host_copies --gib 8

The first rows pin chunks: as torch does, and as policies/pinned_memory.py does with several threads. The others
copy one tensor through the pool's pages, and through one block of torch's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from policies.activations.host_pool import CHUNK_BYTES, HostPool
from policies.activations.transfers import StreamTransfers
from policies.pinned_memory import Region, pinned_region
from utils.units import GIB

T = TypeVar("T")

THREADS = (1, 2, 4, 8, 16)


def seconds_of(work: Callable[[], T]) -> tuple[float, T]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    done = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, done


def pin_by_torch(num_chunks: int) -> list[torch.Tensor]:
    return [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(num_chunks)]


def pin_in_threads(executor: ThreadPoolExecutor, num_chunks: int) -> list[Region]:
    return [*executor.map(pinned_region, [CHUNK_BYTES] * num_chunks)]


def pinning_rows(num_chunks: int) -> Iterable[tuple[str, float]]:
    """Ways of pinning, and their GiB per second."""
    gib = num_chunks * CHUNK_BYTES / GIB
    seconds, blocks = seconds_of(partial(pin_by_torch, num_chunks))
    yield "pinned by torch", gib / seconds
    del blocks
    torch._C._host_emptyCache()
    for threads in THREADS:
        with ThreadPoolExecutor(threads) as executor:
            seconds, chunks = seconds_of(partial(pin_in_threads, executor, num_chunks))
        yield f"pinned in {threads} threads", gib / seconds
        for chunk in chunks:
            chunk.release()


def copy_rows(num_bytes: int, device: torch.device) -> Iterable[tuple[str, float]]:
    """Copies of one tensor, and their GiB per second, from the second one on."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    whole = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    transfers = StreamTransfers(device, HostPool(pinned_region, 8))

    def out() -> Any:
        copies, copied = transfers.to_host([tensor.untyped_storage()])
        transfers.wait(copied)
        return copies

    copies = out()
    ways: dict[str, Callable[[], Any]] = {
        "to the host, one block": lambda: whole.copy_(tensor, non_blocking=True),
        "to the host, pages": out,
        "to the device, one block": lambda: tensor.copy_(whole, non_blocking=True),
        "to the device, pages": lambda: transfers.wait(transfers.to_device(copies)[1]),
    }
    for name, work in ways.items():
        work()
        yield name, num_bytes / GIB / min(seconds_of(work)[0] for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8, help="host memory to pin in each way")
    options = parser.parse_args()
    device = torch.device("cuda")
    print("| what | GiB/s |\n|---|---|")
    for name, rate in [*pinning_rows(options.gib * int(GIB) // CHUNK_BYTES), *copy_rows(2**30, device)]:
        print(f"| {name} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
