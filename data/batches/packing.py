"""Packing: whole sequences into rows of a fixed length, of a whole data set and of a stream."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

import numpy as np

from data.sequences.tokenized import HasTokens

S = TypeVar("S", bound=HasTokens)

OPEN_ROWS = 64
"""Rows of a stream that wait for sequences that fit: 99.7 % full on dialogues, 98 % on uniform lengths up to a row."""

RARE = 0.1  # of the micro-batches

Offsets = Literal["none", "shared", "all"]
"""Rows for which a model gets the offsets of their sequences: none, those that sequences share, or all.

`none` is for models that need masks instead. The others take neither masks nor, for a sequence alone, offsets."""


def pack_best_fit(lengths: Sequence[int] | np.ndarray, row_length: int) -> list[list[int]]:
    """Put every sequence, whole, into the open row it fills best; open a new row if it fits none.

    Best-fit decreasing: sequences are placed longest first, ties in the given order. Rows are filled to within 22 %
    of the optimum in the worst case and far closer on text (Johnson, "Near-optimal bin packing algorithms",
    1973). Deterministic.

    Args:
        lengths: tokens of each sequence, none above `row_length`.
        row_length: tokens a row can hold.

    Returns:
        For each row, the indices of its sequences.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    wrong = (lengths <= 0) | (lengths > row_length)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise ValueError(f"sequence {index} has {lengths[index]} tokens; a row holds 1 to {row_length}")
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), dtype=np.int64)  # by place in longest_first
    rows_with: dict[int, list[int]] = {}  # free tokens -> open rows
    spaces = 0  # a bit set: bit n is set if rows_with[n] holds a row. The smallest that fits is one shift away.
    num_rows = place = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = place + count
        while place < end:
            fitting = spaces >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                row = rows_with[free].pop()
                if not rows_with[free]:
                    spaces ^= 1 << free
            else:
                free, row = row_length, num_rows
                num_rows += 1
            # The rest of the row that fits best also fits the next sequence of this length best, while it fits.
            num_placed = min(free // length, end - place)
            row_of[place : place + num_placed] = row
            place += num_placed
            free -= num_placed * length
            if free:
                rows_with.setdefault(free, []).append(row)
                spaces |= 1 << free
    sequences = longest_first[np.argsort(row_of, kind="stable")]
    return [part.tolist() for part in np.split(sequences, np.cumsum(np.bincount(row_of))[:-1])] if num_rows else []


class PackedStream(Generic[S]):
    """Puts each sequence, whole, into the open row it fills best, without knowing what follows.

    A full row is given at once; if too many rows are open, the fullest is. When the sequences end, those of the open
    rows are packed anew, longest first. Bounded-space best fit (Csirik and Johnson, "Bounded space on-line bin
    packing", 1991).

    `open_rows`, from the oldest on, and `ready`, rows to give next, are all that is needed to go on.
    """

    def __init__(self, sequences: Iterable[S], row_length: int, num_open_rows: int = OPEN_ROWS) -> None:
        self.sequences, self.row_length, self.num_open_rows = sequences, row_length, num_open_rows
        self.ready: deque[list[S]] = deque()
        self._rows: dict[int, list[S]] = {}  # that are open
        self._spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
        self._num_rows = 0

    @property
    def open_rows(self) -> list[list[S]]:
        return list(self._rows.values())

    def go_on(self, open_rows: Iterable[list[S]], ready: Iterable[list[S]]) -> None:
        """Continue with the rows that were open and ready."""
        self.ready.extend(ready)
        self._rows = dict(enumerate(open_rows))
        self._num_rows = len(self._rows)
        self._spaces = sorted((self.row_length - _num_tokens(row), number) for number, row in self._rows.items())

    def __iter__(self) -> Iterator[list[S]]:
        yield from self._given()
        for sequence in self.sequences:
            self._place(sequence)
            if self.ready:
                yield from self._given()
        left = [sequence for row in self._rows.values() for sequence in row]
        self._rows = {}
        for indices in pack_best_fit([len(sequence.input_ids) for sequence in left], self.row_length):
            self.ready.append([left[index] for index in indices])
        yield from self._given()

    def _place(self, sequence: S) -> None:
        rows, spaces, length = self._rows, self._spaces, len(sequence.input_ids)
        position = bisect_left(spaces, (length, 0))
        if position < len(spaces):
            free, row = spaces.pop(position)
        else:
            if len(spaces) == self.num_open_rows:
                self.ready.append(rows.pop(spaces.pop(0)[1]))
            free, row = self.row_length, self._num_rows
            self._num_rows += 1
            rows[row] = []
        rows[row].append(sequence)
        if free == length:
            self.ready.append(rows.pop(row))
        else:
            insort(spaces, (free - length, row))

    def _given(self) -> Iterator[list[S]]:
        while self.ready:
            yield self.ready.popleft()


def _num_tokens(row: Sequence[HasTokens]) -> int:
    return sum(len(sequence.input_ids) for sequence in row)


def offsets_of_one_graph(offsets: Offsets, num_sequences: np.ndarray, rows_per_micro_batch: int) -> Offsets:
    """Offsets for all rows, if micro-batches that need none would be rare: layers are compiled once for each kind.

    The first batch of the other kind may come late, and on each rank at another step, while all others wait. Rows of
    one sequence each are a little faster without offsets, so they keep their graph if there are enough of them.

    Args:
        num_sequences: of each row of the run, or of a sample of them.
    """
    lone = float(np.mean(num_sequences == 1)) ** rows_per_micro_batch
    return "all" if offsets == "shared" and lone < RARE else offsets
