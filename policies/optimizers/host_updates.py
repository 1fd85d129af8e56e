"""Updates of weights on the CPU, made by a thread while the device computes, in the order in which they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import nn


@dataclass(eq=False)
class Bucket:
    """Parameters that are updated at once."""

    parameters: list[nn.Parameter]
    gradients: list[torch.Tensor]  # kept until they are read, whatever becomes of `parameter.grad`
    place: int  # among the modules of a forward pass, of the first one that needs these parameters
    arrival: torch.cuda.Event | None  # of the gradients in host memory; None: they are there
    norms: Future[list[torch.Tensor]] = field(default_factory=Future)  # of the gradients, if the owner measures them
    returned: Future[torch.cuda.Event | None] = field(default_factory=Future)  # to readers, who wait for the event

    def has_arrived(self) -> bool:
        return self.arrival is None or self.arrival.query()

    def wait_for_gradients(self) -> None:
        if self.arrival is not None:
            self.arrival.synchronize()

    def fail(self, error: BaseException) -> None:
        for future in (self.norms, self.returned):
            if not future.done():
                future.set_exception(error)


class HostWork(Protocol):
    """The work on a bucket."""

    def measure(self, bucket: Bucket) -> None:
        """Set `bucket.norms`, if they are wanted."""

    def update(self, bucket: Bucket) -> None:
        """Update the weights in host memory."""

    def give_back(self, bucket: Bucket) -> torch.cuda.Event | None:
        """Begin to bring updated weights to where they are read; returns the end of that, or None if it has ended."""


class HostUpdates:
    """The updates of one step at a time, by one thread.

    As long as backward runs, weights that came first are updated first: forward needs them last. The step is decided
    once its loss is known to be finite. From then on, weights return as they are updated, and of those that wait the
    thread takes the ones that the next forward needs first.

    The owner is passed to each call, so that no circle of references keeps it alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimizer")
        self._waiting: list[Bucket] = []
        self._updated: list[Bucket] = []  # in a step that is not decided
        self._measures_first = False
        self.is_decided = True

    def begin_step(self) -> None:
        """Every bucket of the step before has returned."""
        self.is_decided, self._measures_first = False, False

    def add(self, bucket: Bucket, owner: HostWork) -> None:
        with self._lock:
            self._waiting.append(bucket)
        self._thread.submit(self._work, owner)

    def measure_first(self) -> None:
        """All gradients have come: measure all of them before the next update."""
        self._measures_first = True

    def decide(self, owner: HostWork) -> None:
        """The step is made: return what was updated."""
        with self._lock:
            self.is_decided = True
            updated, self._updated = self._updated, []
            for bucket in sorted(updated, key=lambda bucket: bucket.place):
                _attempt(bucket, partial(_give_back, owner))

    def drop(self) -> list[Bucket]:
        """The step is not made. Returns the buckets that were updated all the same; the thread is idle then."""
        with self._lock:
            self._waiting.clear()
        self._thread.submit(lambda: None).result()
        updated, self._updated, self.is_decided = self._updated, [], True
        return updated

    def _work(self, owner: HostWork) -> None:
        if self._measures_first:
            self._measures_first = False
            with self._lock:
                waiting = list(self._waiting)
            for bucket in waiting:
                _attempt(bucket, owner.measure)
        with self._lock:
            following = self._next()
        if following is None or not _attempt(following, owner.update):
            return
        with self._lock:
            if self.is_decided:
                _attempt(following, partial(_give_back, owner))
            else:
                self._updated.append(following)

    def _next(self) -> Bucket | None:
        if not self._waiting:
            return None
        if not self.is_decided:
            return self._waiting.pop(0)
        # Copies to the host are made in order. If none has arrived, the oldest will be the first one.
        arrived = [bucket for bucket in self._waiting if bucket.has_arrived()]
        bucket = min(arrived or self._waiting[:1], key=lambda bucket: bucket.place)
        self._waiting.remove(bucket)
        return bucket


def _give_back(owner: HostWork, bucket: Bucket) -> None:
    bucket.returned.set_result(owner.give_back(bucket))


def _attempt(bucket: Bucket, work: Callable[[Bucket], None]) -> bool:
    """Do this; an error is raised by those who wait for the bucket."""
    try:
        work(bucket)
    except BaseException as error:
        bucket.fail(error)
        return False
    return True
