"""A copy of the state in host memory, which is written to the disk while training goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from policies.pinned_memory import TensorsOnHost, pinned_or_plain_region, region_maker
from utils.host_memory import free_host_bytes
from utils.local_tensors import local_tensor


class HostCopy:
    """Memory for one copy of this rank's part of the state, kept from save to save.

    It is pinned, so that a GPU fills it at the speed of the bus; where CUDA pins none, copying is only slower.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._rooms: list[TensorsOnHost] = []  # own the memory

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
        missing = defaultdict[torch.device, dict[str, torch.Tensor]](dict)
        for name, tensor in tensors.items():
            if name not in self._copies:
                missing[local_tensor(tensor).device][name] = tensor
        for device, there in missing.items():
            room = TensorsOnHost(there.values(), region_maker(device, pinned_or_plain_region))
            self._rooms.append(room)
            self._copies.update(zip(there, room.tensors, strict=True))

    def close(self) -> None:
        """Free the memory."""
        self._copies.clear()
        self._rooms.clear()


def has_room(num_bytes: int, num_copies: int) -> bool:
    """Whether the host has free memory for so many copies of this size, and a tenth more."""
    return 1.1 * num_bytes * num_copies < free_host_bytes()
