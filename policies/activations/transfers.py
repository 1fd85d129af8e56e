"""Copies of tensors' bytes between a device and host memory: on a stream of their own, or at once on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from policies.activations.host_pool import HostBlock, HostPool
from policies.pinned_memory import num_threads, plain_region, region_maker


class Transfers(Protocol):
    """Copies storages between a device and host memory."""

    @property
    def pinned(self) -> HostPool | None:
        """The pinned memory of the copies; None if it needs not be pinned."""

    def make_ahead(self, num_bytes: int) -> None:
        """Begin to make host memory for so many bytes of copies."""

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Sequence[Any], Any]:
        """Copies of the storages, and a handle: once it was waited for, they are whole and storages may be freed."""

    def to_device(self, copies: Sequence[Any]) -> tuple[list[torch.UntypedStorage], Any]:
        """Storages with these copies, and a handle: once it was waited for, they are whole and copies may be freed."""

    def wait(self, copied: Any) -> None:
        """Make all later computation wait for these copies."""


class StreamTransfers:
    """Copies on a stream of their own, from and to pinned memory.

    All copies share this one stream, so a page that is given back may be written to again at once: the copy that read
    it is before the next one.
    """

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self.device, self.pool, self.stream = device, pool, torch.cuda.Stream(device)

    @property
    def pinned(self) -> HostPool:
        return self.pool

    def make_ahead(self, num_bytes: int) -> None:
        self.pool.make_ahead(num_bytes)

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Sequence[HostBlock], Any]:
        copies = [self.pool.take(storage.nbytes()) for storage in storages]
        # The kernels that write these tensors are queued on the computing stream.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for copy, storage in zip(copies, storages, strict=True):
                for page, part in copy.beside(bytes_of(storage)):
                    page.copy_(part, non_blocking=True)
        return copies, self.stream.record_event()

    def to_device(self, copies: Sequence[HostBlock]) -> tuple[list[torch.UntypedStorage], Any]:
        # Allocated for the stream that computes, where they are used and given back.
        arriving = [torch.empty(copy.num_bytes, dtype=torch.uint8, device=self.device) for copy in copies]
        # The memory of `arriving` may still be used by kernels queued before.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for tensor, copy in zip(arriving, copies, strict=True):
                for page, part in copy.beside(tensor):
                    part.copy_(page, non_blocking=True)
        return [tensor.untyped_storage() for tensor in arriving], self.stream.record_event()

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(copied)


class HostTransfers:
    """The same if the device is the host: copies are made at once."""

    pinned = None

    def __init__(self) -> None:
        self.pool = HostPool(plain_region)

    def make_ahead(self, num_bytes: int) -> None: ...

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[Sequence[HostBlock], Any]:
        copies = [self.pool.take(storage.nbytes()) for storage in storages]
        for copy, storage in zip(copies, storages, strict=True):
            for page, part in copy.beside(bytes_of(storage)):
                page.copy_(part)
        return copies, None

    def to_device(self, copies: Sequence[HostBlock]) -> tuple[list[torch.UntypedStorage], Any]:
        arrived = [torch.empty(copy.num_bytes, dtype=torch.uint8) for copy in copies]
        for tensor, copy in zip(arrived, copies, strict=True):
            for page, part in copy.beside(tensor):
                part.copy_(page)
        return [tensor.untyped_storage() for tensor in arrived], None

    def wait(self, copied: Any) -> None: ...


def transfers_for(device: torch.device, local_world_size: int) -> Transfers:
    """Those of a rank that computes on this device.

    Args:
        local_world_size: ranks of this machine, which share its cores.
    """
    if device.type != "cuda":
        return HostTransfers()
    return StreamTransfers(device, HostPool(region_maker(device), num_threads(local_world_size)))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
