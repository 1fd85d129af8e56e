"""A device with streams whose time is simulated: `fully_shard` runs on it as it is, on a CPU, in one process.

Each stream has a clock. Work moves the clock of the current stream; a stream that waits for an event goes to the
event's time. So it is known how long the stream that computes was idle, whatever anybody measures. The host is taken to
be infinitely fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from reporting import collective_timeline


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.time = device, -1.0

    def record(self) -> None:
        self.time = self.device.current.time

    def synchronize(self) -> None:
        """The host is never ahead of an event."""

    def elapsed_time(self, later: SimulatedEvent) -> float:
        """In milliseconds, as of torch.cuda."""
        return 1e3 * (later.time - self.time)


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.time, self.idle_seconds = device, 0.0, 0.0

    def work(self, seconds: float) -> None:
        self.time += seconds

    def _wait_until(self, time: float) -> None:
        self.idle_seconds += max(0.0, time - self.time)
        self.time = max(self.time, time)

    def wait_event(self, event: SimulatedEvent) -> None:
        self._wait_until(event.time)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self._wait_until(stream.time)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self.device)
        event.time = self.time
        return event


class SimulatedDevice:
    """What `torch.cuda` is to `fully_shard`."""

    def __init__(self) -> None:
        self.computing = self.current = SimulatedStream(self)

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def Stream(self, priority: int = 0) -> SimulatedStream:
        return SimulatedStream(self)

    def current_stream(self) -> SimulatedStream:
        return self.current

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Working(nn.Module):
    """A layer that computes for so long: once in forward, twice in backward."""

    def __init__(self, device: SimulatedDevice, seconds: float, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 16), requires_grad=not is_frozen)
        self.device, self.seconds = device, seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Work.apply(inputs * self.weight.sum(), self.device, self.seconds)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, device: SimulatedDevice, seconds: float) -> torch.Tensor:
        ctx.device, ctx.seconds = device, seconds
        device.current.work(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.device.current.work(2 * ctx.seconds)
        return gradients[0], None, None


@contextmanager
def simulated_ranks(world_size: int, seconds: dict[str, float]) -> Iterator[SimulatedDevice]:
    """The first of so many ranks, on a simulated device; the others are not there.

    Args:
        seconds: that each kind of collective takes.
    """
    device = SimulatedDevice()

    def takes(name: str, collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            device.current.work(seconds[name])
            return collective(*args, **kwargs)

        return call

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            patch.setattr(module, "_get_device_handle", lambda _kind: device)
        for name in ("all_gather", "reduce_scatter"):
            for function in (name, f"{name}_each"):
                patch.setattr(collective_timeline, function, takes(name, getattr(collective_timeline, function)))
        patch.setattr(dist, "all_reduce", takes("all_reduce", dist.all_reduce))
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        yield device
