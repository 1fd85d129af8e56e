"""The loader of a streamed run, with the interface of `data.batches.step_loader.StepLoader`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from data.batches.layout import BatchLayout
from data.batches.workers import stop_signals_held_back, watch_parent
from data.sequences.tokenized import Row
from data.streaming.passes import StateMismatch
from data.streaming.sources import Stream
from data.streaming.steps import StreamSteps
from utils.errors import ConfigError, TrainingError

_SHARE_OF_STATE = 0.25
"""A state is taken when so many sequences were given as this share of those that it names. So a state costs little of
the time to read them, and a resumed run reads few of them twice."""


class StreamedStep(NamedTuple):
    """One optimizer step, as the reading process sends it."""

    micro_batches: list[Any]
    lines: tuple[str, ...]
    state: bytes | None = None  # of the stream after this step, now and then
    failure: ConfigError | None = None


class RankSteps(IterableDataset[StreamedStep]):
    """This rank's share of the stream's steps, from `first_step` on.

    Args:
        state: of the stream at that step or before it; None: it is read from its beginning.
        gives_states: whether to send states, too.
    """

    def __init__(
        self,
        stream: Stream,
        layout: BatchLayout,
        rank: int,
        collate: Callable[[list[Row]], Any],
        first_step: int,
        *,
        state: bytes | None = None,
        gives_states: bool = False,
    ) -> None:
        self.stream, self.layout, self.rank, self.collate = stream, layout, rank, collate
        self.first_step, self.state, self.gives_states = first_step, state, gives_states

    def __iter__(self) -> Iterator[StreamedStep]:
        try:
            yield from self._steps()
        except ConfigError as error:  # not raised: a worker would wrap it in a traceback
            yield StreamedStep([], (), failure=error)

    def _steps(self) -> Iterator[StreamedStep]:
        steps, num_since = StreamSteps(self.stream, self.layout.global_batch_size), 0
        before: tuple[str, ...] = ()
        if self.state is not None:
            try:
                steps.go_on(self.state)
            except StateMismatch as error:
                steps, before = StreamSteps(self.stream, self.layout.global_batch_size), (read_again(error),)
        for rows, lines in steps:
            num_since += sum(map(len, rows))
            if steps.step <= self.first_step:
                continue
            state = None
            if self.gives_states and num_since >= _SHARE_OF_STATE * steps.num_held:
                state, num_since = steps.state(), 0
            places = self.layout.cut(range(len(rows)), self.rank)
            micro_batches = [self.collate([rows[place] for place in part]) for part in places]
            yield StreamedStep(micro_batches, (*before, *lines), state)
            before = ()


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
        self.state: bytes | None = None
        """State of the stream at the last step or a few steps earlier, for a checkpoint; set it to go on."""

    def __len__(self) -> int:
        return self.stream.num_steps

    def ends_epoch(self, num_steps: int) -> bool:
        """Never: a resumed run with more steps goes on in the same epoch."""
        return False

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """The steps of the run's one epoch (0) from `first_step` on.

        What `state` leaves up to there is read and not given; without a state, everything is.

        Raises:
            TrainingError: if the data cannot be read on; the same on every rank.
        """
        if epoch != 0:
            raise ValueError(f"a stream is one epoch; there is no epoch {epoch}")
        mismatch = StreamSteps(self.stream, self.layout.global_batch_size).mismatch(self.state)
        if first_step and mismatch:
            self.state = None
            self.say(read_again(mismatch))
        steps = RankSteps(
            self.stream,
            self.layout,
            self.rank,
            self.collate,
            first_step,
            state=self.state,
            gives_states=self.rank == 0 and all(source.places is not None for source in self.stream.sources),
        )
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
            for step in batches:
                if step.failure is not None:
                    raise TrainingError(str(step.failure), step.failure.details)
                for line in step.lines:
                    self.say(line)
                self.state = step.state or self.state
                yield step.micro_batches
        finally:
            if share := self.stream.share:
                share.end()


def read_again(reason: object) -> str:
    """The line on a stream that does not go on at its place."""
    return f"resume: the stream is read again from its beginning, since {reason}"


def _start_worker(worker: int) -> None:
    gc.freeze()  # objects from before the fork: the collector's marks would copy every page of them
    watch_parent(worker)


def _as_it_is(step: Any) -> Any:
    return step
