"""Which rows an optimizer step trains on, and how they are cut into ranks and micro-batches.

The rows of step s depend on seed, epoch and the global batch size alone (ARCHITECTURE: one global batch). How they
are cut changes nothing but speed: every rank makes the same number of micro-batches, and where rows run out it
gets an empty one, which the collate function turns into a batch without labels. So no rank ever waits for a
collective that another one does not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from data.order import epoch_order
from data.packing import pack_best_fit
from data.sequences import Examples
from data.workers import stop_signals_held_back, watch_parent

Document = tuple[np.ndarray, np.ndarray, int]  # input_ids [length], labels [length], row of the data file


class Rows(Dataset[list[Document]]):
    """Rows of a batch: each a list of documents, one under padding, several under packing.

    Row i holds `documents[offsets[i]:offsets[i + 1]]`: flat arrays, which forked workers share, where a list would be
    copied to each of them by the counting of its references.
    """

    def __init__(self, examples: Examples, documents: np.ndarray, offsets: np.ndarray, *, packed: bool) -> None:
        self.examples, self.documents, self.offsets, self.packed = examples, documents, offsets, packed

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        before = np.concatenate([[0], np.cumsum(self.examples.lengths[self.documents])])
        return np.diff(before[self.offsets])

    def first(self, num_rows: int) -> Rows:
        """The first rows alone."""
        return Rows(self.examples, self.documents, self.offsets[: num_rows + 1], packed=self.packed)

    def __getitem__(self, index: int) -> list[Document]:
        return [
            (*self.examples.document(document), int(self.examples.source_rows[document]))
            for document in self.documents[self.offsets[index] : self.offsets[index + 1]]
        ]


def make_rows(
    examples: Examples, *, batching_strategy: str, context_length: int, documents: np.ndarray | None = None
) -> Rows:
    """Packing places documents into rows once, so that every epoch has the same number of rows; epochs shuffle rows.

    Args:
        documents: which documents an epoch holds, int64 [n], some perhaps several times; unset: each once.
    """
    if documents is None:
        documents = np.arange(len(examples))
    if batching_strategy == "padding":
        return Rows(examples, documents, np.arange(len(documents) + 1), packed=False)
    rows = pack_best_fit(examples.lengths[documents], context_length)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Rows(examples, documents[np.concatenate(rows)], offsets, packed=True)


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is cut. `rows_per_micro_batch` is per rank."""

    rows_per_micro_batch: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step."""
        return self.rows_per_micro_batch * self.gradient_accumulation_steps * self.world_size

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps of an epoch; the last may hold fewer rows."""
        return -(-num_rows // self.global_batch_size)

    def num_micro_batches(self, num_rows: int) -> int:
        """Micro-batches of one step of so many rows, the same on every rank."""
        return -(-num_rows // (self.rows_per_micro_batch * self.world_size))

    def cut(self, rows: Sequence[int], rank: int) -> list[list[int]]:
        """This rank's micro-batches of one step's rows; the same number on every rank, some perhaps empty."""
        size, stride = self.rows_per_micro_batch, self.rows_per_micro_batch * self.world_size
        return [list(rows[start + rank * size : start + (rank + 1) * size]) for start in range(0, len(rows), stride)]


class StepSampler(Sampler[list[int]]):
    """One rank's micro-batches of an epoch, in order, from `first_step` on."""

    def __init__(
        self, num_rows: int, layout: BatchLayout, rank: int, seed: int | None, lengths: np.ndarray | None = None
    ) -> None:
        self.num_rows, self.layout, self.rank, self.seed, self.lengths = num_rows, layout, rank, seed, lengths
        self.epoch = self.first_step = 0

    def order(self) -> np.ndarray:
        """All rows in this epoch's order, see `data.order`."""
        size = self.layout.global_batch_size
        return epoch_order(
            self.num_rows, seed=self.seed, epoch=self.epoch, global_batch_size=size, lengths=self.lengths
        )

    def steps(self) -> Iterator[list[list[int]]]:
        """Per optimizer step, this rank's micro-batches."""
        order, size = self.order(), self.layout.global_batch_size
        for start in range(self.first_step * size, self.num_rows, size):
            yield self.layout.cut(order[start : start + size].tolist(), self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batches in self.steps():
            yield from micro_batches


class StepLoader:
    """Iterates over an epoch's optimizer steps; each is the list of this rank's micro-batches.

    Packed rows, alike in length, are shuffled; padded rows come in global batches of like length (`data.order`).
    """

    def __init__(
        self,
        rows: Rows,
        layout: BatchLayout,
        *,
        rank: int,
        seed: int | None,
        collate: Callable[[list[list[Document]]], Any],
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.rows, self.layout = rows, layout
        self.sampler = StepSampler(len(rows), layout, rank, seed, None if rows.packed else rows.lengths)
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

    def __len__(self) -> int:
        return self.layout.num_steps(len(self.rows))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """The steps of an epoch, both counted from 0: what a whole epoch gives from `first_step` on."""
        self.sampler.epoch, self.sampler.first_step = epoch, first_step
        with stop_signals_held_back():
            batches = iter(self.loader)
        size, num_rows = self.layout.global_batch_size, len(self.rows)
        for start in range(first_step * size, num_rows, size):
            num_micro_batches = self.layout.num_micro_batches(min(size, num_rows - start))
            yield [next(batches) for _ in range(num_micro_batches)]
