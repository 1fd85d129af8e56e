"""Loss and gradient norm of an optimizer step: the device computes them, and the host reads them when it needs them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from supervision.non_finite import NonFiniteError


class StepNumbers:
    """The loss and the gradient norm of a step, on their way to the host. Reading them waits for the device.

    Attributes:
        ready_at: once they were read, when the device had computed them, by time.perf_counter.
        was_read: whether `read` has returned them.
    """

    def __init__(
        self,
        numbers: torch.Tensor,
        losses: Sequence[torch.Tensor],
        rows: Sequence[Sequence[int]],
        *,
        may_overflow: bool,
    ) -> None:
        """
        Args:
            numbers: [2], the loss and the gradient norm, the same on every rank.
            losses: of this rank's micro-batches.
            rows: the examples in each of them, by their numbers in the training data.
            may_overflow: whether the norm may be infinite: in fp16, while the loss scale can still fall.
        """
        self._losses, self._rows, self._may_overflow = losses, rows, may_overflow
        self._on_host = numbers.to("cpu", non_blocking=True)  # in pinned memory, so the host goes on
        self._arrived: torch.Event | None = None
        self._device = numbers.device
        self.ready_at, self.was_read = time.perf_counter(), False
        if numbers.device.type != "cpu":
            self._arrived = torch.Event(numbers.device, enable_timing=True)
            self._arrived.record()

    def read(self) -> tuple[float, float]:
        """The loss (mean over the label tokens of the global batch) and the gradient norm before clipping.

        Raises:
            NonFiniteError: on every rank, if the loss is not finite, or the norm, unless it may overflow.
        """
        # docs/decisions.md, "One wait per step, and the device does not wait for it".
        if self._arrived is not None:
            self.ready_at = time_of(self._arrived, self._event_of_now)
            self._arrived = None
        loss, grad_norm = self._on_host.tolist()
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or self._may_overflow):
            bad = [not math.isfinite(micro_loss) for micro_loss in self._losses]
            suspects = [rows for rows, is_bad in zip(self._rows, bad, strict=True) if is_bad]
            raise NonFiniteError([*chain(*suspects)], [*chain(*self._rows)])
        self.was_read = True
        return loss, grad_norm

    def _event_of_now(self) -> torch.Event:
        """An event on a stream without work, so it need not wait for steps that are queued."""
        now = torch.Event(self._device, enable_timing=True)
        now.record(_idle_stream(self._device))
        return now


@functools.cache
def _idle_stream(device: torch.device) -> torch.Stream:
    """One for all steps: of 32 streams that torch deals out in turn, some carry collectives of the next step."""
    return torch.Stream(device)


def time_of(event: torch.Event, event_of_now: Callable[[], torch.Event]) -> float:
    """When the device reached the event, by time.perf_counter. The host waits for that.

    If kernels are short, the device is done with a step before the host, which queues the next one first, asks. Counted
    to where it asks, a run's last step would have taken no time.
    """
    if not event.query():
        event.synchronize()
        return time.perf_counter()
    now = event_of_now()
    now.synchronize()
    return time.perf_counter() - event.elapsed_time(now) / 1e3
