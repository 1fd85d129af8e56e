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

from utils.examples import Examples
from utils.packing import pack_best_fit

Document = tuple[np.ndarray, np.ndarray, int]  # input_ids [length], labels [length], row of the data file


class Rows(Dataset[list[Document]]):
    """Rows of a batch: each a list of documents, one under padding, several under packing."""

    def __init__(self, examples: Examples, documents_of_row: Sequence[Sequence[int]]) -> None:
        self.examples = examples
        self.documents_of_row = documents_of_row

    def __len__(self) -> int:
        return len(self.documents_of_row)

    def first(self, num_rows: int) -> Rows:
        """The first rows alone."""
        return Rows(self.examples, self.documents_of_row[:num_rows])

    def __getitem__(self, index: int) -> list[Document]:
        return [
            (*self.examples.document(document), int(self.examples.source_rows[document]))
            for document in self.documents_of_row[index]
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
    if batching_strategy == "packing":
        packed = pack_best_fit(examples.lengths[documents].tolist(), context_length)
        return Rows(examples, [documents[row].tolist() for row in packed])
    return Rows(examples, documents[:, None].tolist())


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

    def cut(self, rows: Sequence[int], rank: int) -> list[list[int]]:
        """This rank's micro-batches of one step's rows; the same number on every rank, some perhaps empty."""
        size, stride = self.rows_per_micro_batch, self.rows_per_micro_batch * self.world_size
        return [list(rows[start + rank * size : start + (rank + 1) * size]) for start in range(0, len(rows), stride)]


class StepSampler(Sampler[list[int]]):
    """One rank's micro-batches of an epoch, in order."""

    def __init__(self, num_rows: int, layout: BatchLayout, rank: int, seed: int | None) -> None:
        self.num_rows, self.layout, self.rank, self.seed = num_rows, layout, rank, seed
        self.epoch = 0

    def order(self) -> np.ndarray:
        """All rows in this epoch's order; in file order without a seed."""
        if self.seed is None:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)

    def steps(self) -> Iterator[list[list[int]]]:
        """Per optimizer step, this rank's micro-batches."""
        order, size = self.order().tolist(), self.layout.global_batch_size
        for start in range(0, self.num_rows, size):
            yield self.layout.cut(order[start : start + size], self.rank)

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batches in self.steps():
            yield from micro_batches


class StepLoader:
    """Iterates over an epoch's optimizer steps; each is the list of this rank's micro-batches."""

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
        self.sampler = StepSampler(len(rows), layout, rank, seed)
        self.loader = DataLoader(
            rows,
            batch_sampler=self.sampler,
            collate_fn=collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # not the global one: reading data must not change dropout
        )

    def __len__(self) -> int:
        return self.layout.num_steps(len(self.rows))

    def epoch(self, epoch: int) -> Iterator[list[Any]]:
        """The steps of an epoch (counted from 0)."""
        self.sampler.epoch = epoch
        batches = iter(self.loader)
        for micro_batches in self.sampler.steps():
            yield [next(batches) for _ in micro_batches]
