"""The loader of a streamed run, with the interface of `data.step_loader.StepLoader`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from data.batch_layout import BatchLayout
from data.sequences import Row
from data.streaming import Stream
from data.workers import stop_signals_held_back, watch_parent
from utils.errors import ConfigError, TrainingError


class StreamedStep(NamedTuple):
    """One optimizer step, as the reading process sends it."""

    micro_batches: list[Any]
    lines: tuple[str, ...]
    failure: ConfigError | None = None


class RankSteps(IterableDataset[StreamedStep]):
    """This rank's share of the stream's steps, from `first_step` on."""

    def __init__(
        self, stream: Stream, layout: BatchLayout, rank: int, collate: Callable[[list[Row]], Any], first_step: int
    ) -> None:
        self.stream, self.layout, self.rank, self.collate = stream, layout, rank, collate
        self.first_step = first_step

    def __iter__(self) -> Iterator[StreamedStep]:
        try:
            for step, (rows, lines) in enumerate(self.stream.steps(self.layout.global_batch_size)):
                if step >= self.first_step:
                    places = self.layout.cut(range(len(rows)), self.rank)
                    yield StreamedStep([self.collate([rows[place] for place in part]) for part in places], lines)
        except ConfigError as error:  # not raised: a worker would wrap it in a traceback
            yield StreamedStep([], (), error)


class StreamLoader:
    """Iterates over the run's optimizer steps; each is the list of this rank's micro-batches.

    The whole run is one epoch. When a pass over the data ends, a line is printed and the next pass begins.
    """

    def __init__(
        self,
        stream: Stream,
        layout: BatchLayout,
        *,
        rank: int,
        collate: Callable[[list[Row]], Any],
        num_workers: int = 0,
        pin_memory: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.stream, self.layout, self.rank, self.collate, self.say = stream, layout, rank, collate, say
        self.num_workers, self.pin_memory = min(1, num_workers), pin_memory

    def __len__(self) -> int:
        return self.stream.num_steps

    def ends_epoch(self, num_steps: int) -> bool:
        """Never: a resumed run with more steps goes on in the same epoch."""
        return False

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """The steps of the run's one epoch (0) from `first_step` on; earlier rows are read and not collated.

        Raises:
            TrainingError: if the data cannot be read on; the same on every rank.
        """
        if epoch != 0:
            raise ValueError(f"a stream is one epoch; there is no epoch {epoch}")
        steps = RankSteps(self.stream, self.layout, self.rank, self.collate, first_step)
        loader: Iterable[StreamedStep] = DataLoader(
            steps,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            worker_init_fn=_start_worker,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # not the global one: reading data must not change dropout
        )
        with stop_signals_held_back():
            batches = iter(loader)
        try:
            for micro_batches, lines, failure in batches:
                if failure is not None:
                    raise TrainingError(str(failure), failure.details)
                for line in lines:
                    self.say(line)
                yield micro_batches
        finally:
            if share := self.stream.share:
                share.end()


def _start_worker(worker: int) -> None:
    gc.freeze()  # objects from before the fork: the collector's marks would copy every page of them
    watch_parent(worker)


def _as_it_is(step: Any) -> Any:
    return step
