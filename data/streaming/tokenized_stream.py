"""A stream of examples that is tokenized block by block, each block by whoever needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import datasets

from data.files.row_stream import RowBlock, RowCursor, RowPlace, RowStream
from utils.progress import shows_progress

UNREAD_KEYS = "unread_keys"  # of the turns of conversations: a column that is said and then left out
Rows = list[Mapping[str, Any]]

_NUM_CHECKED = 16  # files, before the start


class RowBatch(NamedTuple):
    """Rows that follow each other, which are made when they are asked for."""

    first_row: int  # of the stream, from 0
    num_rows: int
    rows: Callable[[], Rows]
    place: RowPlace | None = None  # from which it can be read again


class TokenizedStream:
    """The rows of a stream, tokenized. It can be pickled for a worker process.

    Args:
        tokenize: a dataclass (`data.tokenizing`), called with rows or columns and the rows' numbers in the
            stream.
        said: the unread keys of turns that were named already.
    """

    def __init__(
        self, data: RowStream | datasets.IterableDataset, tokenize: Any, batch_size: int, said: set[str] | None = None
    ) -> None:
        self.data, self.tokenize, self.batch_size = data, tokenize, batch_size
        self.said = set[str]() if said is None else said

    @property
    def places(self) -> RowStream | None:
        """The rows, if they can be read from any place on."""
        return self.data if isinstance(self.data, RowStream) and self.data.seeks else None

    def check_files(self) -> None:
        """Tokenize the first row of some later files, whose columns may make their rows unusable.

        Raises:
            ConfigError: naming the file of a row that cannot be used, unless such rows are skipped.
        """
        examples = self.tokenize.examples
        if isinstance(self.data, RowStream) and not examples.skips_bad_rows:
            for file, rows in self.data.first_rows(_NUM_CHECKED):
                replace(self.tokenize, examples=replace(examples, place=str(file)))(rows, range(len(rows)))

    def shared(self) -> TokenizedStream:
        """The same, where each block is tokenized by one process alone, which tells what is left out."""
        return TokenizedStream(self.data, replace(self.tokenize, speaks=True), self.batch_size, self.said)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self.batches(self.batch_size):
            yield from batch.rows()

    def batches(
        self, size: int, max_rows: int | None = None, *, epoch: int = 0, start: tuple[int, RowPlace] | None = None
    ) -> Iterator[RowBatch]:
        """The rows, `size` at a time; nothing is tokenized yet.

        Args:
            epoch: files, if there are several, come in another order in each but the first.
            start: the number and the place of the first row.
        """
        if not isinstance(self.data, RowStream):
            yield from self._batches_of_columns(self.data, size, max_rows, epoch)
            return
        cursor = self.data.cursor(epoch if max_rows is None else 0)
        first, place = start or (0, cursor.place)
        while block := cursor.block(place, size if max_rows is None else min(size, max_rows - first)):
            yield RowBatch(first, len(block), partial(self._rows_of_block, block, first), block.place)
            first, place = first + len(block), block.end

    def picked(self, blocks: Sequence[tuple[int, RowPlace, Sequence[int]]]) -> Iterator[RowBatch]:
        """Some rows of earlier blocks.

        Args:
            blocks: of each the number of its first row, its place, and which of its rows: the first is 0.
        """
        assert isinstance(self.data, RowStream)
        cursor: RowCursor = self.data.cursor()
        for first, place, wanted in blocks:
            block = cursor.block(place, max(wanted) + 1)
            yield RowBatch(first, len(wanted), partial(self._rows_of_block, block, first, wanted), place)

    def _rows_of_block(self, block: RowBlock, first: int, wanted: Sequence[int] | None = None) -> Rows:
        rows = block.read()
        if wanted is None:
            return self._rows(rows, range(first, first + len(rows)))
        return self._rows([rows[index] for index in wanted], [first + index for index in wanted])

    def _batches_of_columns(
        self, data: datasets.IterableDataset, size: int, max_rows: int | None, epoch: int
    ) -> Iterator[RowBatch]:
        data.set_epoch(epoch)
        first = 0
        for columns in (data if max_rows is None else data.take(max_rows)).iter(batch_size=size):
            number = len(next(iter(columns.values())))
            yield RowBatch(first, number, partial(self._rows, columns, range(first, first + number)))
            first += number

    def _rows(self, rows: Any, numbers: Sequence[int]) -> Rows:
        tokens = self.tokenize(rows, numbers)
        new = {key for keys in tokens.pop(UNREAD_KEYS, ()) for key in keys} - self.said
        if new and (self.tokenize.speaks or shows_progress()):
            self.said |= new
            self.tokenize.examples.say_unread_keys(sorted(new))
        return [dict(zip(tokens, values, strict=True)) for values in zip(*tokens.values(), strict=True)]
