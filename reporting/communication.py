"""How long an optimizer step waits for other ranks' tensors: measured in a few steps, and written as events.

A rank waits in a collective for two reasons: bytes are on the way, or another rank has not come yet. The rank that
comes last waits for the bytes alone. So the smallest wait of all ranks, for each collective, is the network's; the rest
is for slower ranks. Collectives of weights and gradients count, the few of single numbers do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks.collectives import min_on_host
from reporting.collective_timeline import KINDS, Clock, Timeline, WatchedUnits
from utils.torch_internals import backward_seconds, time_backward

FIRST_MEASURED = (3, 4, 5, 10, 20)
THEN_EVERY = 100


def is_measured_step(step: int) -> bool:
    """Whether communication is measured in this step of the session, counted from 1: the first ones warm up."""
    return step in FIRST_MEASURED or step % THEN_EVERY == 0


class _OwnFigures(NamedTuple):
    """One rank's measurements of a step."""

    kinds: list[str]  # of each collective
    sent_bytes: list[float]
    seconds: list[float]
    waits: list[float]  # seconds of each wait


class StepCommunication:
    """The communication of one step that was measured."""

    def __init__(self, read: Callable[[], _OwnFigures]) -> None:
        self._read: Callable[[], _OwnFigures] | None = read

    def figures(self) -> dict[str, float]:
        """The figures of a `communication` event. Every rank must call this once, after it has waited for the device.

        A wait counts as long as on the rank that waited least for it. A collective counts as a whole, whether it
        overlapped computing or not.
        """
        assert self._read is not None, "figures are read once"
        own = self._read()
        self._read = None  # it holds the model, and DistributedDataParallel must end before its process group
        # The least of the negatives is the longest wait of any rank, so one all-reduce serves for both extremes.
        least, *smallest = min_on_host([-sum(own.waits), *own.waits, *own.seconds])
        exposed, seconds = sum(smallest[: len(own.waits)]), smallest[len(own.waits) :]
        figures = {"exposed_seconds": exposed, "straggler_seconds": -least - exposed}
        for kind in KINDS:
            of_kind = [place for place, one in enumerate(own.kinds) if one == kind]
            figures[f"{kind}_seconds"] = sum(seconds[place] for place in of_kind)
            figures[f"{kind}_sent_gb"] = sum(own.sent_bytes[place] for place in of_kind) / 1e9
        return figures


class CommunicationRecorder:
    """Measures the communication of some steps. Every rank makes the same calls."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        """
        Args:
            model: sharded, or wrapped in DistributedDataParallel.
        """
        self.model = model
        self.num_steps = 0  # of this session
        # Only if there are others: watching replaces methods of every unit.
        self.units = WatchedUnits(model, clock) if dist.get_world_size() > 1 else None

    @contextmanager
    def step(self) -> Iterator[StepCommunication | None]:
        """A context for each step; None if the step is not measured."""
        self.num_steps += 1
        if self.units is None or not is_measured_step(self.num_steps):
            yield None
            return
        if isinstance(model := self.model, DistributedDataParallel):
            time_backward(model)
            yield StepCommunication(lambda: _of_data_parallel(model))
            return
        with self.units.recording() as timeline:
            yield StepCommunication(lambda: _of_units(timeline))


def _of_units(timeline: Timeline) -> _OwnFigures:
    return _OwnFigures(
        [one.kind for one in timeline.collectives],
        [one.sent_bytes for one in timeline.collectives],
        timeline.collective_seconds(),
        timeline.exposed_seconds(),
    )


def _of_data_parallel(model: DistributedDataParallel) -> _OwnFigures:
    """All buckets as one all-reduce, which ranks wait for once backward has computed all gradients."""
    seconds, exposed = backward_seconds(model)
    size = dist.get_world_size()
    reduced = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return _OwnFigures(["all_reduce"], [2 * reduced * (size - 1) / size], [seconds], [exposed])
