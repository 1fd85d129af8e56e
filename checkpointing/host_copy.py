"""A copy of the state in host memory, which is written to the disk while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from policies.pinned_memory import Region, cleared_pages, pinned_pages
from utils.host_memory import free_host_bytes
from utils.local_tensors import local_tensor

_LARGE = 2**20  # bytes; smaller tensors share pages, and a page can be pinned only once


class HostCopy:
    """Memory for one copy of this rank's part of the state, kept from save to save.

    It is pinned, so that a GPU fills it at the speed of the bus; where CUDA pins none, copying is only slower.

    Args:
        num_threads: that make room at once.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._pinned: list[Region] = []
        self._num_threads = num_threads

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the tensors as they are now, sharded alike; they are valid until the next call."""
        for name in self._copies.keys() - tensors.keys():
            del self._copies[name]
        self.prepare(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                local_tensor(self._copies[name]).copy_(local_tensor(tensor), non_blocking=True)
        # The writing thread reads this memory without waiting for the stream.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return dict(self._copies)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make room for these tensors, as far as there is none: pinning takes longer than copying."""
        missing = [name for name in tensors if name not in self._copies]
        with ThreadPoolExecutor(self._num_threads, "checkpoint-memory") as threads:
            rooms = threads.map(self._make_room, [tensors[name] for name in missing])
            self._copies.update(zip(missing, rooms, strict=True))

    @torch.no_grad()  # so a DTensor gives its own part, not a view
    def _make_room(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(tensor, device="cpu")
        local, device = local_tensor(copy), local_tensor(tensor).device
        if local.nbytes >= _LARGE:
            pages = cleared_pages(local.nbytes)
            if device.type == "cuda":
                with torch.cuda.device(device):  # of this thread
                    region = pinned_pages(pages)
                if region is not None:
                    self._pinned.append(region)
            local.set_(pages.untyped_storage(), 0, local.shape, local.stride())
        return copy

    def close(self) -> None:
        """Free the memory."""
        for region in self._pinned:
            region.release()
        self._pinned.clear()
        self._copies.clear()


def has_room(num_bytes: int, num_copies: int) -> bool:
    """Whether the host has free memory for so many copies of this size, and a tenth more."""
    return 1.1 * num_bytes * num_copies < free_host_bytes()
