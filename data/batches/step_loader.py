"""The loader of a run that does not stream: one optimizer step at a time, as this rank's micro-batches.

The rows of step s depend on seed, epoch and the global batch size alone, never on ranks, micro-batches or workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from data.batches.layout import BatchLayout
from data.batches.order import epoch_order
from data.batches.rows import Rows
from data.batches.workers import stop_signals_held_back, watch_parent
from data.sequences.tokenized import Row
from utils.errors import TrainingError


@dataclass(frozen=True)
class Unreadable:
    """Returned by a collator instead of a micro-batch if a row cannot be read: the run ends with this message."""

    message: str


class StepSampler(Sampler[list[int]]):
    """One rank's micro-batches, in order: of `epoch` from `first_step` on, then of the epochs after it."""

    def __init__(
        self,
        num_rows: int,
        layout: BatchLayout,
        rank: int,
        seed: int | None,
        lengths: np.ndarray | None = None,
        num_epochs: int = 1,
    ) -> None:
        self.num_rows, self.layout, self.rank, self.seed, self.lengths = num_rows, layout, rank, seed, lengths
        self.num_epochs = num_epochs
        self.epoch = self.first_step = 0

    def order(self) -> np.ndarray:
        """All rows in this epoch's order (`data.batches.order`)."""
        size = self.layout.global_batch_size
        return epoch_order(
            self.num_rows, seed=self.seed, epoch=self.epoch, global_batch_size=size, lengths=self.lengths
        )

    def steps(self) -> Iterator[list[list[int]]]:
        """Per optimizer step, this rank's micro-batches."""
        size = self.layout.global_batch_size
        order = self.order()[: self.layout.rows_of_epoch(self.num_rows)]
        for start in range(self.first_step * size, len(order), size):
            yield self.layout.cut(order[start : start + size].tolist(), self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            for micro_batches in self.steps():
                yield from micro_batches
            if self.epoch + 1 >= self.num_epochs:
                return
            self.epoch, self.first_step = self.epoch + 1, 0


class StepLoader:
    """Iterates over an epoch's optimizer steps; each is the list of this rank's micro-batches.

    Packed rows are alike in length and are shuffled. Padded rows come in global batches of like length
    (`data.batches.order`). Workers read on into the next epoch, so that its first step waits for no picture.
    """

    def __init__(
        self,
        rows: Rows,
        layout: BatchLayout,
        *,
        rank: int,
        seed: int | None,
        collate: Callable[[list[Row]], Any],
        num_workers: int = 0,
        pin_memory: bool = False,
        num_epochs: int = 1,
    ) -> None:
        """
        Args:
            num_epochs: of the run. Beyond them nothing is read ahead.
        """
        self.rows, self.layout = rows, layout
        self.sampler = StepSampler(len(rows), layout, rank, seed, None if rows.packed else rows.lengths, num_epochs)
        self.loader = DataLoader(
            rows,
            batch_sampler=self.sampler,
            collate_fn=collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=watch_parent,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # not the global one: reading data must not change dropout
        )
        self._batches: Iterator[Any] = iter(())
        self._next_epoch: int | None = None  # the one that `_batches` goes on with

    def __len__(self) -> int:
        return self.layout.num_steps(len(self.rows))

    def ends_epoch(self, num_steps: int) -> bool:
        """Whether an epoch is over after so many of its steps."""
        return num_steps == len(self)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """The steps of an epoch from `first_step` on; both count from 0.

        Raises:
            TrainingError: for a row that cannot be read, on its own rank alone.
        """
        if epoch != self._next_epoch or first_step or epoch >= self.sampler.num_epochs:
            self.sampler.epoch, self.sampler.first_step = epoch, first_step
            with stop_signals_held_back():
                self._batches = iter(self.loader)
        self._next_epoch = None
        size, num_rows = self.layout.global_batch_size, self.layout.rows_of_epoch(len(self.rows))
        for start in range(first_step * size, num_rows, size):
            num_micro_batches = self.layout.num_micro_batches(min(size, num_rows - start))
            micro_batches = [_readable(next(self._batches)) for _ in range(num_micro_batches)]
            if start + size >= num_rows:
                self._next_epoch = epoch + 1
            yield micro_batches


def _readable(batch: Any) -> Any:
    if isinstance(batch, Unreadable):
        raise TrainingError(batch.message)
    return batch
