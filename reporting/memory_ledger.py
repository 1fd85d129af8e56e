"""The memory ledger: the parts of a rank's memory at the four phases of a step.

It needs no thread and no polling: the run calls `record` at each phase of the few steps that are observed. On a GPU the
figures are the allocator's; paged optimizer states, which it does not know, count as host memory. A CPU has no
allocator to ask: there "allocated" is the process's resident memory, and "other" includes the interpreter and its
libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from utils.host_memory import peak_resident
from utils.local_tensors import local_tensor
from utils.units import GIB


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> dict[str, int]:
    """The bytes that this rank holds, by device type. A storage that several tensors share counts once."""
    seen: set[tuple[str, int]] = set()
    totals = {"cpu": 0, "cuda": 0}
    for tensor in tensors:
        if tensor is None:
            continue
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        key = (local.device.type, storage.data_ptr())
        if storage.nbytes() == 0 or key in seen:
            continue
        seen.add(key)
        totals[local.device.type] = totals.get(local.device.type, 0) + storage.nbytes()
    return totals


def bytes_by_name(tensors: Iterable[tuple[str, torch.Tensor | None]], kind: str) -> dict[str, int]:
    """The bytes that this rank holds on devices of one type, by name."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors:
        if tensor is not None and (local := local_tensor(tensor)).device.type == kind:
            sizes[name] = sizes.get(name, 0) + local.nbytes
    return sizes


def optimizer_tensors(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class MemoryLedger:
    """Measures one rank's memory at the phases of a step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        # Listed once: while a unit is gathered, `fully_shard` lets the model hold the gathered tensors instead.
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters, self.buffers = list(model.parameters()), list(model.named_buffers())
        self.model, self.optimizer, self.device = model, optimizer, device
        self.phase = ""  # the last of PHASES that the current step has reached
        self.allocated_before_forward = 0  # in bytes
        self._entries: list[dict[str, Any]] | None = None  # of a step that is observed

    @property
    def has_allocator(self) -> bool:
        """Whether the device has an allocator that knows what is allocated."""
        return self.device.type == "cuda"

    @contextmanager
    def step(self, *, is_observed: bool) -> Iterator[list[dict[str, Any]] | None]:
        """A context for one step.

        Yields:
            A `memory` event for each recorded phase, without step and rank; None if the step is not observed.
        """
        self.phase = ""  # stays after the step: an out-of-memory report tells it
        self._entries = [] if is_observed else None
        try:
            yield self._entries
        finally:
            self._entries = None

    def record(self, phase: str) -> None:
        """Measure the memory at one of `memory_phases.PHASES`, if the step is observed."""
        self.phase = phase
        # `before_forward` is measured in every step: an out-of-memory report counts activations from there.
        if phase != "before_forward" and self._entries is None:
            return
        allocated, peak, reserved, retries = self.allocator()
        if phase == "before_forward":
            self.allocated_before_forward = allocated
        if self._entries is None:
            return
        held, on_device = self.held(), self.device.type != "cpu"
        activations = allocated - self.allocated_before_forward if phase == "after_forward" else 0
        figures = {
            **{f"{part}_gib": size for part, size in held.items()},
            "activations_gib": activations,
            "other_gib": allocated - sum(held.values()) - activations,
            "allocated_gib": allocated,
            "peak_allocated_gib": peak,
            "reserved_gib": reserved,
            "optimizer_cpu_gib": local_bytes(optimizer_tensors(self.optimizer))["cpu"] if on_device else 0,
            "host_rss_gib": psutil.Process().memory_info().rss,
        }
        self._entries.append(
            {"phase": phase} | {name: value / GIB for name, value in figures.items()} | {"num_alloc_retries": retries}
        )

    def held(self) -> dict[str, int]:
        """The bytes on the device of parameters with buffers, of gradients, and of optimizer states."""
        kind = self.device.type
        return {
            "params": local_bytes([*self.parameters, *(buffer for _, buffer in self.buffers)])[kind],
            "grads": local_bytes(parameter.grad for parameter in self.parameters)[kind],
            "optimizer": local_bytes(optimizer_tensors(self.optimizer))[kind],
        }

    def by_name(self) -> dict[str, dict[str, int]]:
        """Like `held`, by parameter; without spare room in their storages."""
        named = list(zip(self.names, self.parameters, strict=True))
        name_of: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
        states = [
            (name_of[parameter], value)
            for parameter, state in self.optimizer.state.items()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        kind = self.device.type
        return {
            "params": bytes_by_name([*named, *self.buffers], kind),
            "grads": bytes_by_name([(name, parameter.grad) for name, parameter in named], kind),
            "optimizer": bytes_by_name(states, kind),
        }

    def peak_gib(self) -> float:
        """The highest allocated memory of this rank so far."""
        return self.allocator()[1] / GIB

    def allocator(self) -> tuple[int, int, float, int]:
        """Bytes allocated now, allocated at the peak, and reserved; and the number of allocations retried."""
        if self.device.type == "cuda":
            # torch.cuda.memory_allocated and the like sort all of these figures first, while the device waits.
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            return allocated["current"], allocated["peak"], reserved["current"], stats["num_alloc_retries"]
        resident = psutil.Process().memory_info().rss
        return resident, max(peak_resident(), resident), math.nan, 0


def is_observed_step(step: int, *, last_of_epoch: bool) -> bool:
    """Whether memory is recorded in this step: steps 1 and 2, multiples of 50, and the last of an epoch."""
    return step <= 2 or step % 50 == 0 or last_of_epoch
