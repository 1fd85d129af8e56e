"""The order of training: a function of seed, epoch and global batch size alone, for a whole data set and a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from data.batches.draws import Draws
from data.sequences.tokenized import HasTokens

WINDOW_ROWS = 1024  # sorted together: enough for neighbours of like length, few enough that epochs differ
MIN_WINDOWS = 4  # so that small data, too, has other global batches in every epoch
BATCHES_PER_WINDOW = 32  # of a stream under padding: global batches whose sequences are sorted by length together

T = TypeVar("T")
S = TypeVar("S", bound=HasTokens)


def epoch_order(
    num_rows: int, *, seed: int | None, epoch: int, global_batch_size: int, lengths: np.ndarray | None = None
) -> np.ndarray:
    """All rows in the order in which an epoch takes them, `global_batch_size` of them in each optimizer step.

    Without `lengths` the rows are shuffled. With `lengths` they are shuffled, sorted by length inside windows of about
    `WINDOW_ROWS` and cut into global batches, which are shuffled. So a global batch holds rows of like length, longest
    first, and so does each of its micro-batches, over all ranks. A smaller last batch stays last; its rows are a random
    choice.

    Args:
        seed: None for evaluation, which is not shuffled: file order, or all rows sorted, longest first.
        epoch: counted from 0.
        lengths: tokens of each row, [num_rows], if rows are padded to the longest of their batch.

    Returns:
        Row indices, int64 [num_rows].
    """
    if seed is None:
        return np.arange(num_rows) if lengths is None else _longest_first(np.arange(num_rows), lengths)
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(num_rows)
    if lengths is None:
        return shuffled
    num_batches = num_rows // global_batch_size
    num_in_batches = num_batches * global_batch_size
    num_windows = max(MIN_WINDOWS, round(num_in_batches / WINDOW_ROWS))
    windows = np.array_split(shuffled[:num_in_batches].reshape(num_batches, global_batch_size), num_windows)
    batches = np.concatenate(
        [_longest_first(window.reshape(-1), lengths).reshape(-1, global_batch_size) for window in windows]
    )
    rest = _longest_first(shuffled[num_in_batches:], lengths)
    return np.concatenate([batches[generator.permutation(num_batches)].reshape(-1), rest])


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows sorted by length; rows of one length stay in their order."""
    return rows[np.argsort(-lengths[rows], kind="stable")]


class Shuffled(Generic[T]):
    """All items of a stream, each drawn evenly from a buffer of `buffer_size` that were read and not yet given.

    `held` are the items read and not given; with `state()` they are all that is needed to go on.
    """

    def __init__(self, items: Iterable[T], buffer_size: int, rng: np.random.Generator) -> None:
        self.items, self.buffer_size, self.rng = items, buffer_size, rng
        self.held: list[T] = []
        self._places = Draws(rng, lambda rng: rng.integers(buffer_size, size=1024).tolist())
        self._last: dict[str, Any] | None = None  # once the stream has ended: the generator, and items given since

    def __iter__(self) -> Iterator[T]:
        iterator = iter(self.items)
        if self._last is None:
            self.held += islice(iterator, self.buffer_size - len(self.held))
            if len(self.held) == self.buffer_size:
                for item in iterator:
                    place = next(self._places)
                    drawn, self.held[place] = self.held[place], item
                    yield drawn
            self._last = {"generator": self.rng.bit_generator.state, "num_given": 0}
        self.rng.bit_generator.state = self._last["generator"]
        order = self.rng.permutation(len(self.held)).tolist()
        for place in order[self._last["num_given"] :]:
            self._last["num_given"] += 1
            yield self.held[place]

    def state(self) -> dict[str, Any]:
        return {"places": self._places.state(), "last": self._last and dict(self._last)}

    def go_on(self, state: Mapping[str, Any], held: list[T]) -> None:
        """Continue from a state with the items that were held then."""
        self._places.go_on(state["places"])
        self.held, self._last = held, state["last"] and dict(state["last"])


def in_batches(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """`size` rows at a time; the last batch may be smaller."""
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


class BatchesByLength(Generic[S]):
    """Batches of sequences of like length, one sequence per row, shortest first; the last batch may be smaller.

    The sequences of `BATCHES_PER_WINDOW` batches are sorted by length and cut; these batches come in random order.
    `ready` are the batches of the window that were not given.
    """

    def __init__(self, sequences: Iterable[S], size: int, rng: np.random.Generator) -> None:
        self.sequences, self.size, self.rng = sequences, size, rng
        self.ready: deque[list[list[S]]] = deque()

    def __iter__(self) -> Iterator[list[list[S]]]:
        windows = in_batches(([sequence] for sequence in self.sequences), BATCHES_PER_WINDOW * self.size)
        while True:
            while self.ready:
                yield self.ready.popleft()
            window = next(windows, None)
            if window is None:
                return
            num_whole = len(window) // self.size
            rows = sorted(window[: num_whole * self.size], key=_num_tokens)
            for batch in self.rng.permutation(num_whole).tolist():
                self.ready.append(rows[batch * self.size : (batch + 1) * self.size])
            if rest := window[num_whole * self.size :]:
                self.ready.append(sorted(rest, key=_num_tokens))

    def state(self) -> dict[str, Any]:
        return {"generator": self.rng.bit_generator.state}

    def go_on(self, state: Mapping[str, Any], ready: Iterable[list[list[S]]]) -> None:
        """Continue from a state with the batches that were ready then."""
        self.rng.bit_generator.state = state["generator"]
        self.ready.extend(ready)


def _num_tokens(row: Sequence[HasTokens]) -> int:
    return len(row[0].input_ids)
