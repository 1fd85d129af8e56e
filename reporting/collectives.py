"""When the collectives of `fully_shard` run, and when computing waits for them, in a step that is observed.

On a GPU collectives run beside computing. Events on their streams say when each one ends, and an event on the stream
that computes says when it is about to wait: it is exposed from there to the end. The host waits for none of them. On a
CPU a collective holds up the host that calls it, so all of it is exposed.

What is gathered and reduced goes through `set_custom_all_gather`, `set_custom_reduce_scatter` and `set_all_reduce_hook`
of `FSDPModule`. That computing waits on a GPU is seen by methods of torch's parameter groups, which are private
(`utils.torch_internals.parameter_groups`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from utils.compat import all_gather, reduce_scatter
from utils.torch_internals import no_scattering_pending, parameter_groups

KINDS = ("all_gather", "reduce_scatter", "all_reduce")

Mark = Any
"""A moment: seconds of a clock, or an event that a stream comes to."""


class Clock(Protocol):
    """Takes moments, and says later when they were."""

    collectives_block: bool  # whether the host waits inside a collective

    def mark(self) -> Mark: ...

    def seconds(self, begin: Mark, mark: Mark) -> float:
        """From one moment to another. Both must have come."""


class HostClock:
    collectives_block = True

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, begin: Mark, mark: Mark) -> float:
        return float(mark - begin)


class DeviceClock:
    """Events of the stream that is current. A mark costs the host a few microseconds."""

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
        mark.synchronize()  # it has come already, unless torch ends a step before all that was exchanged has arrived
        return float(begin.elapsed_time(mark)) / 1e3


def clock_of(device: torch.device) -> Clock:
    if device.type == "cuda":
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))
    return HostClock()


class Collective(NamedTuple):
    kind: str  # of KINDS
    sent_bytes: float  # by each rank, if they stand in a ring
    start: Mark
    end: Mark


class StepTimeline:
    """The collectives of one step, and the waits for them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.active = False
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self.began: Mark = self.clock.mark() if self.active else None
        self.collectives: list[Collective] = []
        self.waits: list[tuple[Mark, Sequence[Mark]]] = []  # from which moment on, and for which ends
        self.reducing: list[Mark] = []  # the ends of reductions that computing has not waited for
        self.scattering: Mark | None = None  # that of the last reduce-scatter, before the next one's wait

    def add(self, kind: str, sent_bytes: float, start: Mark) -> Mark:
        """Note a collective that ends now, and return its end."""
        end = self.clock.mark()
        self.collectives.append(Collective(kind, sent_bytes, start, end))
        if self.clock.collectives_block:
            self.waits.append((start, [end]))
        return end

    def add_wait(self, before: Mark, ends: Sequence[Mark]) -> None:
        """Note that computing waits from `before` on until all of these have ended."""
        if not self.clock.collectives_block:
            self.waits.append((before, ends))

    def exposed_seconds(self) -> list[float]:
        """Of each wait, in the order in which they came."""
        of = self._since_began
        return [max(0.0, max(map(of, ends)) - of(before)) for before, ends in self.waits]

    def collective_seconds(self) -> list[float]:
        """Of each collective. One that waits for an earlier one of its kind has not started."""
        ended = dict.fromkeys(KINDS, 0.0)
        seconds = []
        for kind, _, start, end in self.collectives:
            seconds.append(max(0.0, self._since_began(end) - max(self._since_began(start), ended[kind])))
            ended[kind] = self._since_began(end)
        return seconds

    def _since_began(self, mark: Mark) -> float:
        return self.clock.seconds(self.began, mark)


class _Allocating:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class TimedAllGather(_Allocating):
    """All-gather as `fully_shard` does it, noted if the step is observed. It stands for one unit."""

    def __init__(self, timeline: StepTimeline) -> None:
        self.timeline = timeline
        self.gathering: Mark | None = None  # the end of a gathering that computing has not waited for

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not self.timeline.active:
            return all_gather(output_tensor, input_tensor, group, async_op=async_op)
        start = self.timeline.clock.mark()
        work = all_gather(output_tensor, input_tensor, group, async_op=async_op)
        self.gathering = self.timeline.add("all_gather", _sent(output_tensor, group.size()), start)
        return work


class TimedReduceScatter(_Allocating):
    """Reduce-scatter as `fully_shard` does it, and the all-reduce over copies after it, noted if the step is observed.

    It stands for one unit.
    """

    def __init__(self, timeline: StepTimeline, num_copies: int) -> None:
        self.timeline, self.num_copies = timeline, num_copies
        self.all_reduce_starts: Mark | None = None
        self.waits_from: Mark | None = None  # when computing came to the unit's reduction

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called for the input, and then, on the stream that reduces, for the output, before anything is reduced."""
        if self.timeline.active:
            self.all_reduce_starts = self.timeline.clock.mark()
            self.has_waited()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        timeline = self.timeline
        if not timeline.active:
            return reduce_scatter(output_tensor, input_tensor, group, op=op, async_op=async_op)
        start = timeline.clock.mark()
        work = reduce_scatter(output_tensor, input_tensor, group, op=op, async_op=async_op)
        times = 2 if timeline.clock.collectives_block else 1  # gloo reduces on all ranks, and each keeps its part
        end = timeline.add("reduce_scatter", times * _sent(input_tensor, group.size()), start)
        timeline.scattering = self.all_reduce_starts = end
        timeline.reducing.append(end)
        return work

    def has_waited(self) -> None:
        """Note that computing has waited for the reduce-scatter before this unit's."""
        timeline = self.timeline
        if self.waits_from is not None and timeline.scattering is not None:
            timeline.add_wait(self.waits_from, [timeline.scattering])
        self.waits_from = timeline.scattering = None

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """Called on the stream of the all-reduce over copies, after it."""
        if self.timeline.active:
            sent_bytes = 2 * _sent(reduced, self.num_copies)
            self.timeline.reducing.append(self.timeline.add("all_reduce", sent_bytes, self.all_reduce_starts))


def _sent(whole: torch.Tensor, num_ranks: int) -> float:
    """Bytes that each rank of a ring sends, so that all have the whole tensor."""
    return whole.numel() * whole.element_size() * (num_ranks - 1) / num_ranks


def watch_units(model: nn.Module, timeline: StepTimeline) -> None:
    """Let the collectives of the model's units be noted in the timeline, whenever it is active."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for group in parameter_groups(unit):
                _watch(unit, group, timeline)


def _watch(unit: Any, group: Any, timeline: StepTimeline) -> None:
    gather, scatter = TimedAllGather(timeline), TimedReduceScatter(timeline, _num_copies(unit))
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(scatter)
    if scatter.num_copies > 1:
        unit.set_all_reduce_hook(scatter.all_reduced)
    if timeline.clock.collectives_block:
        return
    wait_for_unshard, post_backward = group.wait_for_unshard, group.post_backward
    finalize_backward = group.finalize_backward

    def timed_wait_for_unshard() -> None:
        if timeline.active and gather.gathering is not None:
            timeline.add_wait(timeline.clock.mark(), [gather.gathering])
        gather.gathering = None
        wait_for_unshard()

    def timed_post_backward(*unused: Any) -> None:
        # Before this unit's gradients are copied to be reduced, computing waits for the reduce-scatter before it.
        scatter.waits_from = timeline.clock.mark() if timeline.active else None
        post_backward(*unused)
        if no_scattering_pending(group):  # a unit that trains nothing waits, too, since torch 2.13
            scatter.has_waited()
        scatter.waits_from = None

    def timed_finalize_backward() -> None:
        if timeline.active and timeline.reducing:  # the first unit's call waits for all that is left
            timeline.add_wait(timeline.clock.mark(), timeline.reducing)
            timeline.reducing, timeline.scattering = [], None
        finalize_backward()

    group.wait_for_unshard, group.post_backward = timed_wait_for_unshard, timed_post_backward
    group.finalize_backward = timed_finalize_backward


def _num_copies(unit: Any) -> int:
    """Of the model: the ranks over which the unit's gradients are reduced after they are scattered."""
    meshes = [parameter.device_mesh for parameter in unit.parameters() if isinstance(parameter, DTensor)]
    return int(meshes[0].size(0)) if meshes and meshes[0].ndim == 2 else 1
