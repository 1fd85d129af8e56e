"""One pass over a stream, which can be left after any step and gone on with from its state.

The state names the sequences that were read and not yet given (those of the shuffle buffer and of open rows) by the
blocks of rows that they come from, so it is small. These rows are read and tokenized once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.batches.mixing import Interleaved, global_row, source_of
from data.batches.order import BatchesByLength, Shuffled, in_batches
from data.batches.packing import PackedStream
from data.files.row_stream import RowPlace
from data.sequences.tokenized import Row, Sequences, TokenSequence
from data.streaming.pass_counts import PassCounts
from data.streaming.sources import Stream, StreamSource

Reference = list[int]  # source, block, row of the block, part of the row


class StateMismatch(ValueError):
    """The data do not hold what a state names."""


class StreamedSequence(NamedTuple):
    """A sequence, and where it can be read again."""

    sequence: TokenSequence
    block: int  # of its source, as `SourcePass.blocks` numbers them
    row: int  # of the block
    part: int  # of the row, which may give several sequences

    @property
    def input_ids(self) -> np.ndarray:
        return self.sequence.input_ids

    def reference(self) -> Reference:
        return [source_of(self.sequence.source_row), self.block, self.row, self.part]


class SourcePass:
    """The sequences of one source, from any of them on. A source that ends may start again within a pass."""

    def __init__(self, source: StreamSource, index: int, number: int, counts: PassCounts) -> None:
        self.source, self.index, self.number, self.counts = source, index, number, counts
        self.blocks: dict[int, tuple[int, RowPlace]] = {}  # first row and place of those that may be needed
        self._block, self._num_taken = -1, 0  # the block that is being given, and how many of its sequences were
        self._goes_on = False

    def started(self, num_starts: int) -> Iterator[StreamedSequence]:
        """Its sequences from the first, for the n-th time (from 0); once those that a state leaves."""
        goes_on, self._goes_on = self._goes_on, False
        start = self.blocks[self._block] if goes_on and self._block >= 0 else None
        num_passed_over = self._num_taken if start else 0
        for batch, sequences in self.source.placed_blocks(self.number + num_starts, start=start):
            if start is None:
                self._block += 1
            start = None
            if batch.place is not None:
                self.blocks[self._block] = (batch.first_row, batch.place)
            self._num_taken = num_passed_over
            for item in _items(sequences, self.index, self._block, batch.first_row, num_passed_over):
                self._num_taken += 1
                yield item
            num_passed_over = 0
            self.counts.add_checks(sequences)

    def state(self, needed: set[int]) -> dict[str, Any]:
        """Args: needed: blocks of which sequences wait to be given; others are forgotten."""
        self.blocks = {number: self.blocks[number] for number in sorted(needed | {self._block}) if number >= 0}
        places = {str(number): [first, *place] for number, (first, place) in self.blocks.items()}
        return {"blocks": places, "block": self._block, "num_taken": self._num_taken}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.blocks = {
            int(number): (int(first), RowPlace(*map(int, place))) for number, (first, *place) in state["blocks"].items()
        }
        self._block, self._num_taken, self._goes_on = int(state["block"]), int(state["num_taken"]), True

    def again(self, references: Sequence[Reference]) -> Iterator[tuple[Reference, StreamedSequence]]:
        """Sequences that were read before.

        Raises:
            StateMismatch: if one is not there.
        """
        rows: dict[int, set[int]] = {}
        for _, block, row, _ in references:
            rows.setdefault(block, set()).add(row)
        missing = {tuple(reference) for reference in references}
        in_order = sorted(rows, key=lambda block: self.blocks[block][1])
        picked = self.source.picked([(*self.blocks[block], sorted(rows[block])) for block in in_order])
        for block, sequences in zip(in_order, picked, strict=True):
            for item in _items(sequences, self.index, block, self.blocks[block][0]):
                reference = item.reference()
                if tuple(reference) in missing:
                    missing.discard(tuple(reference))
                    yield reference, item
        if missing:
            raise StateMismatch(f"{len(missing)} of its samples are not there")


class StreamPass:
    """Global batches of one pass over the data."""

    def __init__(self, stream: Stream, number: int, global_batch_size: int) -> None:
        self.counts = PassCounts(tuple(source.dataset for source in stream.sources))
        mixing, shuffling, batching = (np.random.default_rng([stream.seed, number, use]) for use in range(3))
        self._sources = [SourcePass(source, index, number, self.counts) for index, source in enumerate(stream.sources)]
        self._mixed = Interleaved([source.started for source in self._sources], stream.weights, mixing)
        self._shuffled = Shuffled(self._mixed, stream.shuffle_buffer_size, shuffling)
        self._batches: BatchesByLength[StreamedSequence] | None = None
        if stream.packing:
            self._packed = PackedStream(self._shuffled, stream.context_length)
            self._rows: Iterator[list[list[StreamedSequence]]] = in_batches(self._packed, global_batch_size)
        else:
            self._batches = BatchesByLength(self._shuffled, global_batch_size, batching)
            self._rows = iter(self._batches)

    def __iter__(self) -> Iterator[list[Row]]:
        for rows in self._rows:
            batch = [[item.sequence for item in row] for row in rows]
            self.counts.add_rows(batch)
            yield batch

    @property
    def num_held(self) -> int:
        """Sequences that were read and not given: about the size of a state."""
        rows = len(self._batches.ready) * len(self._batches.ready[0]) if self._batches and self._batches.ready else 0
        return len(self._shuffled.held) + rows

    def state(self) -> dict[str, Any]:
        """The state after the last batch, for `go_on`."""
        held = [item.reference() for item in self._shuffled.held]
        rows: dict[str, Any]
        if self._batches is not None:
            waiting = [[_references(row) for row in batch] for batch in self._batches.ready]
            rows = {"batches": waiting, "batching": self._batches.state()}
            named = [held, *(row for batch in waiting for row in batch)]
        else:
            open_rows, ready = ([*map(_references, part)] for part in (self._packed.open_rows, self._packed.ready))
            rows = {"open_rows": open_rows, "ready": ready}
            named = [held, *open_rows, *ready]
        needed: list[set[int]] = [set() for _ in self._sources]
        for references in named:
            for source, block, _, _ in references:
                needed[source].add(block)
        return {
            "counts": self.counts.state(),
            "sources": [source.state(blocks) for source, blocks in zip(self._sources, needed, strict=True)],
            "mixing": self._mixed.state(),
            "held": held,
            "shuffling": self._shuffled.state(),
            "rows": rows,
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the sequences that waited then are read again.

        Raises:
            StateMismatch: if one of them is not there.
        """
        self.counts.go_on(state["counts"])
        for source, of_source in zip(self._sources, state["sources"], strict=True):
            source.go_on(of_source)
        self._mixed.go_on(state["mixing"])
        rows = state["rows"]
        batches = [row for batch in rows["batches"] for row in batch] if self._batches else []
        of_rows = batches if self._batches else [*rows["open_rows"], *rows["ready"]]
        named = [tuple(reference) for references in (state["held"], *of_rows) for reference in references]
        found: dict[tuple[int, ...], StreamedSequence] = {}
        for index, source in enumerate(self._sources):
            wanted = [list(reference) for reference in dict.fromkeys(named) if reference[0] == index]
            found |= {tuple(reference): item for reference, item in source.again(wanted)}

        def items(references: Sequence[Reference]) -> list[StreamedSequence]:
            return [found[tuple(reference)] for reference in references]

        self._shuffled.go_on(state["shuffling"], items(state["held"]))
        if self._batches is not None:
            ready = [[items(row) for row in batch] for batch in rows["batches"]]
            self._batches.go_on(rows["batching"], ready)
        else:
            self._packed.go_on(map(items, rows["open_rows"]), map(items, rows["ready"]))


def _references(row: Sequence[StreamedSequence]) -> list[Reference]:
    return [item.reference() for item in row]


def _items(
    sequences: Sequences, source: int, block: int, first_row: int, num_passed_over: int = 0
) -> Iterator[StreamedSequence]:
    part, before = 0, -1
    for number, sequence in enumerate(sequences):
        row = sequence.source_row
        part, before = part + 1 if row == before else 0, row
        if number >= num_passed_over:
            # Copies: a slice of the block's arrays would keep the whole block alive while it waits in the buffer.
            copied = sequence._replace(
                input_ids=sequence.input_ids.copy(),
                labels=sequence.labels.copy(),
                source_row=global_row(source, row),
            ).with_columns({name: values.copy() for name, values in sequence.of_tokens.items()})
            yield StreamedSequence(copied, block, row - first_row, part)
