"""How long an optimizer step waits for other ranks' tensors: measured in a few steps, and written as events.

What a rank waits for a collective has two reasons: bytes are on the way, or another rank has not come yet. The rank
that comes last waits for the bytes alone. So the smallest wait of all ranks, for each collective, is the network's;
what a rank waits beyond is for slower ranks. The collectives of weights and gradients count, the few of single numbers
do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks.collectives import min_on_host
from reporting.collectives import KINDS, Clock, StepTimeline, watch_units
from utils.torch_internals import backward_seconds, time_backward

FIRST_OBSERVED = (3, 4, 5, 10, 20)
THEN_EVERY = 100


def observes_communication(step: int) -> bool:
    """Whether communication is measured in this step of the session, counted from 1: the first ones warm up."""
    return step in FIRST_OBSERVED or step % THEN_EVERY == 0


class CommunicationRecorder:
    """Measures the communication of some steps. Every rank makes the same calls."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        """
        Args:
            model: sharded, or wrapped in DistributedDataParallel.
        """
        self.model = model
        self.num_steps = 0  # of this session
        self.timeline = StepTimeline(clock)
        if dist.get_world_size() > 1:
            watch_units(model, self.timeline)

    @contextmanager
    def __call__(self) -> Iterator[bool]:
        """A context for one step: whether it is observed."""
        self.num_steps += 1
        timeline, model = self.timeline, self.model
        timeline.active = dist.get_world_size() > 1 and observes_communication(self.num_steps)
        timeline.begin()
        if timeline.active and isinstance(model, DistributedDataParallel):
            time_backward(model)
        yield timeline.active

    def take(self) -> dict[str, float]:
        """The figures of the step that has just ended, for a `communication` event; none if it was not observed.

        Every rank must call this, after it has waited for the device. Seconds are what the step waited, as the rank saw
        it that waited least; of a collective, hidden behind computing or not.
        """
        if not self.timeline.active:
            return {}
        self.timeline.active = False
        if isinstance(self.model, DistributedDataParallel):
            kinds, sent_bytes, waits, seconds = self._of_data_parallel(self.model)
        else:
            collectives = self.timeline.collectives
            kinds, sent_bytes = [one.kind for one in collectives], [one.sent_bytes for one in collectives]
            waits, seconds = self.timeline.exposed_seconds(), self.timeline.collective_seconds()
        self.timeline.begin()
        least, *smallest = min_on_host([-sum(waits), *waits, *seconds])
        exposed, seconds = sum(smallest[: len(waits)]), smallest[len(waits) :]
        figures = {"exposed_seconds": exposed, "straggler_seconds": -least - exposed}
        for kind in KINDS:
            of_kind = [place for place, one in enumerate(kinds) if one == kind]
            figures[f"{kind}_seconds"] = sum(seconds[place] for place in of_kind)
            figures[f"{kind}_sent_gb"] = sum(sent_bytes[place] for place in of_kind) / 1e9
        return figures

    @staticmethod
    def _of_data_parallel(
        model: DistributedDataParallel,
    ) -> tuple[list[str], list[float], list[float], list[float]]:
        """All buckets as one all-reduce, which ranks wait for when backward has computed all gradients."""
        seconds, exposed = backward_seconds(model)
        size = dist.get_world_size()
        reduced = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return ["all_reduce"], [2 * reduced * (size - 1) / size], [exposed], [seconds]
