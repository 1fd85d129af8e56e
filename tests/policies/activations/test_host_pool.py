"""Host memory for copies: exact pages, used again, made in threads, given up with the pool."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from policies.activations.host_pool import (
    CHUNK_BYTES,
    PAGE_BYTES,
    HostBlock,
    HostMemoryError,
    HostPool,
    chunk_bytes,
    pool_bytes,
)
from policies.pinned_memory import Region, plain_region


def write(block: HostBlock, contents: torch.Tensor) -> None:
    for page, part in block.beside(contents):
        page.copy_(part)


def read(block: HostBlock) -> torch.Tensor:
    contents = torch.empty(block.num_bytes, dtype=torch.uint8)
    for page, part in block.beside(contents):
        part.copy_(page)
    return contents


def test_copies_of_all_sizes_share_the_pages_and_none_overlaps() -> None:
    pool, draw, held = HostPool(plain_region), random.Random(0), dict[int, HostBlock]()
    for value in range(24):
        size = draw.choice([1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES + 7])
        held[value] = pool.take(size)
        write(held[value], torch.full((size,), value, dtype=torch.uint8))
        if len(held) > 8:
            del held[draw.choice(list(held))]
        assert all(torch.equal(read(block), torch.full_like(read(block), key)) for key, block in held.items())
    assert pool.num_bytes == CHUNK_BYTES  # 9 blocks of at most 6 pages
    held.clear()
    assert len(pool._free) == CHUNK_BYTES // PAGE_BYTES


def test_a_pool_takes_as_many_bytes_as_were_planned() -> None:
    sizes = [10 * PAGE_BYTES + 1] * 8
    planned = chunk_bytes(sum(map(pool_bytes, sizes)))
    assert (pool_bytes(sizes[0]), planned) == (11 * PAGE_BYTES, 2 * CHUNK_BYTES)
    pool = HostPool(plain_region, num_threads=2)
    pool.make_ahead(planned)
    blocks = [pool.take(size) for size in sizes]
    assert pool.num_bytes == planned
    assert len(pool._free) == (planned - len(blocks) * 11 * PAGE_BYTES) // PAGE_BYTES
    more = pool.take(CHUNK_BYTES)  # not planned
    assert pool.num_bytes == planned + CHUNK_BYTES
    assert more.num_bytes == CHUNK_BYTES


def test_a_copy_waits_for_memory_that_is_on_its_way() -> None:
    waits, calls = threading.Event(), list[int]()

    def make(size: int) -> Region:
        calls.append(1)
        assert waits.wait(60)
        return plain_region(size)

    pool = HostPool(make)
    wait = pool._arrival.wait
    pool._arrival.wait = lambda: waits.set() or wait()  # type: ignore[method-assign]
    pool.make_ahead(1)
    pool.take(PAGE_BYTES)
    assert len(calls) == 1
    assert pool.waited_seconds > 0
    assert pool.making_seconds > 0


def test_memory_that_cannot_be_had_ends_the_run_in_one_line() -> None:
    def make(size: int) -> Region:
        raise RuntimeError("no pages\nleft")

    pool = HostPool(make)
    with pytest.raises(HostMemoryError, match=r"^--activation_offloading: .* 0\.0 GiB \(no pages left\); give "):
        pool.take(1)


def test_memory_is_released_with_the_last_reference() -> None:
    released = []
    pool = HostPool(lambda size: Region(plain_region(size).memory, lambda: released.append(1)))
    block = pool.take(2 * CHUNK_BYTES)
    del pool
    gc.collect()
    assert released == []
    del block
    gc.collect()
    assert released == [1, 1]
