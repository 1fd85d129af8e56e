"""A step ends when the device has ended it, not when the host asks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from supervision.step_numbers import StepNumbers, time_of


class Event:
    """An event of a device that was, or will be, reached at some second of the host's clock."""

    def __init__(self, clock: list[float], reached: float) -> None:
        self.clock, self.reached = clock, reached

    def query(self) -> bool:
        return self.clock[0] >= self.reached

    def synchronize(self) -> None:
        self.clock[0] = max(self.clock[0], self.reached)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.reached - self.reached)


@pytest.mark.parametrize("reached", [10.0, 12.5, 14.0], ids=["long ago", "a moment ago", "later"])
def test_the_time_of_an_event_is_when_the_device_reached_it(reached: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [13.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def event_of_now() -> Any:
        return Event(clock, clock[0] + 0.25)  # the device is a moment behind

    event: Any = Event(clock, reached)
    assert time_of(event, event_of_now) == reached


def test_numbers_of_a_cpu_are_there_at_once() -> None:
    before = time.perf_counter()
    numbers = StepNumbers(torch.tensor([2.0, 3.0]), [torch.tensor(2.0)], [[0]], may_overflow=False)
    assert before <= numbers.ready_at <= time.perf_counter()
    assert numbers.read() == (2.0, 3.0)
    assert numbers.was_read
