"""A copy of the state in host memory, which is written to the disk while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from utils.host_memory import free_host_bytes
from utils.local_tensors import local_tensor

_PIN_BYTES = 2**20  # smaller tensors share pages with others, and a page can be pinned only once


class HostCopy:
    """Memory for one copy of this rank's part of the state, kept from save to save.

    It is pinned, so that a GPU fills it at the speed of the bus. Existing pages are pinned, because torch's own
    allocator of pinned memory rounds sizes up to powers of two.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._pinned: list[int] = []

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the tensors as they are now, sharded alike; they are valid until the next call."""
        for name in self._copies.keys() - tensors.keys():
            del self._copies[name]
        with torch.no_grad():
            for name, tensor in tensors.items():
                copy = self._copies.get(name)
                if copy is None:
                    copy = self._copies[name] = self._make_room(tensor)
                local_tensor(copy).copy_(local_tensor(tensor), non_blocking=True)
        # The writing thread reads this memory without waiting for the stream.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return dict(self._copies)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make room for these tensors beforehand: pinning takes longer than copying."""
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = self._make_room(tensor)

    def _make_room(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(tensor, device="cpu")
        local = local_tensor(copy)
        if local_tensor(tensor).device.type == "cuda" and local.nbytes >= _PIN_BYTES:
            status = torch.cuda.cudart().cudaHostRegister(local.data_ptr(), local.nbytes, 0)
            if int(status) == 0:  # else copying is only slower
                self._pinned.append(local.data_ptr())
        return copy

    def close(self) -> None:
        """Free the memory."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()
        self._copies.clear()


def has_room(num_bytes: int, num_copies: int) -> bool:
    """Whether the host has free memory for so many copies of this size, and a tenth more."""
    return 1.1 * num_bytes * num_copies < free_host_bytes()
