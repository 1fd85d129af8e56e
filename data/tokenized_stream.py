"""A stream of examples that is tokenised block by block, each block by whoever needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import datasets

Columns = Mapping[str, Sequence[Any]]


class RowBatch(NamedTuple):
    """Rows that follow each other, which are made when they are asked for."""

    first_row: int  # of the stream, from 0
    num_rows: int
    rows: Callable[[], list[Mapping[str, Any]]]


class TokenizedStream:
    """The rows of an IterableDataset, tokenised. It can be pickled for a worker process.

    Args:
        tokenize: a dataclass (`data.tokenizing`), called with columns and the places of their rows in the stream.
    """

    def __init__(self, data: datasets.IterableDataset, tokenize: Any, batch_size: int) -> None:
        self.data, self.tokenize, self.batch_size = data, tokenize, batch_size

    def shared(self) -> TokenizedStream:
        """The same, where each block is tokenised by one process alone, which tells what is left out."""
        return TokenizedStream(self.data, replace(self.tokenize, speaks=True), self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self.batches(self.batch_size):
            yield from batch.rows()

    def batches(self, size: int, max_rows: int | None = None) -> Iterator[RowBatch]:
        """The rows, `size` at a time; nothing is tokenised yet."""
        data = self.data if max_rows is None else self.data.take(max_rows)
        first = 0
        for columns in data.iter(batch_size=size):
            number = len(next(iter(columns.values())))
            yield RowBatch(first, number, partial(self._rows, columns, range(first, first + number)))
            first += number

    def _rows(self, columns: Columns, indices: range) -> list[Mapping[str, Any]]:
        tokens = self.tokenize(columns, indices)
        return [dict(zip(tokens, values, strict=True)) for values in zip(*tokens.values(), strict=True)]
