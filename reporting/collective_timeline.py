"""When the collectives of `fully_shard` run, and when computing waits for them, in the steps that are recorded.

On a GPU collectives run next to computing. Events on their streams say when each one ends, and an event on the stream
that computes says when it is about to wait: the collective is exposed from there to its end. The host waits for none of
them. On a CPU a collective blocks the host that calls it, so all of it is exposed.

Gathering and reducing go through `set_custom_all_gather`, `set_custom_reduce_scatter` and `set_all_reduce_hook` of
`FSDPModule`. The waits on a GPU are seen by methods of torch's parameter groups, which are private
(`utils.torch_internals.parameter_groups`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from utils.compat import all_gather, reduce_scatter
from utils.torch_internals import (
    all_gather_each,
    no_scattering_pending,
    parameter_groups,
    reduce_scatter_each,
    reduce_scatter_of,
)

KINDS = ("all_gather", "reduce_scatter", "all_reduce")

Mark = Any
"""A moment: seconds of a clock, or an event of a stream."""


class Clock(Protocol):
    """Takes marks, and tells later how far apart they were."""

    collectives_block: bool  # whether the host waits inside a collective

    def mark(self) -> Mark: ...

    def seconds(self, begin: Mark, mark: Mark) -> float:
        """The time from one mark to a later one. Both must have passed."""


class HostClock:
    collectives_block = True

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, begin: Mark, mark: Mark) -> float:
        return float(mark - begin)


class DeviceClock:
    """Marks are events of the current stream. One costs the host a few microseconds."""

    collectives_block = False

    def __init__(self, new_event: Callable[[], Any]) -> None:
        """
        Args:
            new_event: makes an event that knows its time, such as `torch.cuda.Event(enable_timing=True)`.
        """
        self.new_event = new_event

    def mark(self) -> Mark:
        event = self.new_event()
        event.record()
        return event

    def seconds(self, begin: Mark, mark: Mark) -> float:
        mark.synchronize()  # passed already, unless torch ends a step before the last tensor has arrived
        return float(begin.elapsed_time(mark)) / 1e3


def clock_of(device: torch.device) -> Clock:
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    return HostClock()


class Collective(NamedTuple):
    kind: str  # of KINDS
    sent_bytes: float  # by each rank of a ring
    start: Mark
    end: Mark


class Timeline:
    """The collectives of one step, and the waits for them. It begins when it is made."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.began = clock.mark()
        self.collectives: list[Collective] = []
        self.waits: list[tuple[Mark, Sequence[Mark]]] = []  # when computing began to wait, and for which ends
        self.pending_reductions: list[Mark] = []  # ends of reductions that computing has not waited for
        self.last_scatter: Mark | None = None  # the end of the last reduce-scatter, until the next one waits for it

    def add(self, kind: str, sent_bytes: float, start: Mark) -> Mark:
        """Record a collective that ends now. Returns its end."""
        end = self.clock.mark()
        self.collectives.append(Collective(kind, sent_bytes, start, end))
        if self.clock.collectives_block:
            self.waits.append((start, [end]))
        return end

    def add_wait(self, before: Mark, ends: Sequence[Mark]) -> None:
        """Record that computing waits from `before` until all of these ends."""
        # A collective that blocks is recorded as its own wait (`add`).
        if not self.clock.collectives_block:
            self.waits.append((before, ends))

    def exposed_seconds(self) -> list[float]:
        """How long each wait took, in their order."""
        of = self._since_began
        return [max(0.0, max(map(of, ends)) - of(before)) for before, ends in self.waits]

    def collective_seconds(self) -> list[float]:
        """How long each collective took. One that waits for an earlier one of its kind has not started."""
        ended = dict.fromkeys(KINDS, 0.0)
        seconds = []
        for kind, _, start, end in self.collectives:
            seconds.append(max(0.0, self._since_began(end) - max(self._since_began(start), ended[kind])))
            ended[kind] = self._since_began(end)
        return seconds

    def _since_began(self, mark: Mark) -> float:
        return self.clock.seconds(self.began, mark)


class WatchedUnits:
    """The units of a sharded model, whose collectives can be recorded from now on."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.clock = clock
        self.timeline: Timeline | None = None  # of the step that is being recorded
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                for group in parameter_groups(unit):
                    _watch(unit, group, self)

    @contextmanager
    def recording(self) -> Iterator[Timeline]:
        """A context for one step. Its timeline may be read after the context, once the device has ended the step."""
        self.timeline = timeline = Timeline(self.clock)
        try:
            yield timeline
        finally:
            self.timeline = None


class _Allocating:
    """torch's `Comm` interface asks for this; new memory each time, as in its default."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _TimedAllGather(_Allocating):
    """The all-gather of one unit, as `fully_shard` does it."""

    def __init__(self, watched: WatchedUnits) -> None:
        self.watched = watched
        self.pending: Mark | None = None  # the end of an all-gather that computing has not waited for

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._timed([output_tensor], group):
            return all_gather(output_tensor, input_tensor, group, async_op=async_op)

    def each(self, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Gather a unit's weights without packing (policies/direct_transfers.py)."""
        with self._timed(wholes, group):
            all_gather_each(wholes, parts, group)

    @contextmanager
    def _timed(self, wholes: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Iterator[None]:
        timeline = self.watched.timeline
        start = None if timeline is None else timeline.clock.mark()
        yield
        if timeline is not None:
            self.pending = timeline.add("all_gather", sum(_sent(whole, group.size()) for whole in wholes), start)


class _TimedReduceScatter:
    """The reduce-scatter of one unit, and the all-reduce over copies after it, as `fully_shard` does them."""

    def __init__(self, watched: WatchedUnits, num_copies: int, untimed: Any) -> None:
        """
        Args:
            untimed: the unit's reduce-scatter until now; memory is allocated as it does.
        """
        self.watched, self.num_copies, self.untimed = watched, num_copies, untimed
        self.all_reduce_start: Mark | None = None
        self.waits_from: Mark | None = None  # when computing came to the unit's reduction

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called for the input, and then, on the stream that reduces, for the output, before anything is reduced."""
        if (timeline := self.watched.timeline) is not None:
            self.all_reduce_start = timeline.clock.mark()
            self.has_waited(timeline)
        allocated: torch.Tensor = self.untimed.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._timed([input_tensor], group):
            return reduce_scatter(output_tensor, input_tensor, group, op=op, async_op=async_op)

    def each(
        self, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group: dist.ProcessGroup, op: Any
    ) -> None:
        """Reduce a unit's gradients without packing (policies/direct_transfers.py)."""
        with self._timed(wholes, group):
            reduce_scatter_each(parts, wholes, group, op)

    @contextmanager
    def _timed(self, wholes: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Iterator[None]:
        timeline = self.watched.timeline
        start = None if timeline is None else timeline.clock.mark()
        yield
        if timeline is None:
            return
        times = 2 if timeline.clock.collectives_block else 1  # gloo all-reduces, and each rank keeps its part
        end = timeline.add("reduce_scatter", times * sum(_sent(whole, group.size()) for whole in wholes), start)
        timeline.last_scatter = self.all_reduce_start = end
        timeline.pending_reductions.append(end)

    def has_waited(self, timeline: Timeline) -> None:
        """Record that computing has waited for the reduce-scatter before this unit's."""
        if self.waits_from is not None and timeline.last_scatter is not None:
            timeline.add_wait(self.waits_from, [timeline.last_scatter])
        self.waits_from = timeline.last_scatter = None

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """Called on the stream of the all-reduce over copies, after it."""
        if (timeline := self.watched.timeline) is not None:
            sent_bytes = 2 * _sent(reduced, self.num_copies)
            timeline.pending_reductions.append(timeline.add("all_reduce", sent_bytes, self.all_reduce_start))


def _sent(whole: torch.Tensor, num_ranks: int) -> float:
    """Bytes that each rank of a ring sends until all ranks have the whole tensor."""
    return whole.numel() * whole.element_size() * (num_ranks - 1) / num_ranks


def _watch(unit: Any, group: Any, watched: WatchedUnits) -> None:
    gather = _TimedAllGather(watched)
    scatter = _TimedReduceScatter(watched, _num_copies(unit), reduce_scatter_of(group))
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    if scatter.num_copies > 1:
        unit.set_all_reduce_hook(scatter.all_reduced)
    if watched.clock.collectives_block:
        return
    # docs/decisions.md, "Waiting for the network is measured where ranks wait".
    wait_for_unshard, post_backward = group.wait_for_unshard, group.post_backward
    finalize_backward = group.finalize_backward

    def timed_wait_for_unshard() -> None:
        timeline = watched.timeline
        if timeline is not None and gather.pending is not None:
            timeline.add_wait(timeline.clock.mark(), [gather.pending])
        gather.pending = None
        wait_for_unshard()

    def timed_post_backward(*unused: Any) -> None:
        # Before it copies this unit's gradients, computing waits for the previous unit's reduce-scatter.
        timeline = watched.timeline
        scatter.waits_from = None if timeline is None else timeline.clock.mark()
        post_backward(*unused)
        if timeline is not None and no_scattering_pending(group):  # since torch 2.13 a unit that trains nothing waits
            scatter.has_waited(timeline)
        scatter.waits_from = None

    def timed_finalize_backward() -> None:
        timeline = watched.timeline
        if timeline is not None and timeline.pending_reductions:  # the first unit's call waits for all that is left
            timeline.add_wait(timeline.clock.mark(), timeline.pending_reductions)
            timeline.pending_reductions, timeline.last_scatter = [], None
        finalize_backward()

    group.wait_for_unshard, group.post_backward = timed_wait_for_unshard, timed_post_backward
    group.finalize_backward = timed_finalize_backward


def _num_copies(unit: Any) -> int:
    """Copies of the model among which the unit's gradients are all-reduced after the reduce-scatter."""
    meshes = [parameter.device_mesh for parameter in unit.parameters() if isinstance(parameter, DTensor)]
    return int(meshes[0].size(0)) if meshes and meshes[0].ndim == 2 else 1
