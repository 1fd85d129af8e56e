"""Several datasets in one run: how many sequences of each make an epoch, which ones, and where each came from.

A sequence's source row is one number: its row in the low bits, and above them its dataset, by its place in `--dataset`.
With one dataset it is the row itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from data.batches.draws import Draws
from data.sequences.token_columns import end_to_end
from data.sequences.tokenized import Sequences
from data.tokens.spans import BadExample
from utils.errors import ConfigError
from utils.wording import plural

T = TypeVar("T")

_ROW_BITS = 48
_MAX_SAMPLES = 2**31


def global_row(source: int, row: int) -> int:
    """One number for a dataset's place in `--dataset` and a row of it; both count from 0."""
    return source << _ROW_BITS | row


def source_of(number: int) -> int:
    """The dataset of a global row, by its place in `--dataset`."""
    return number >> _ROW_BITS


def row_of(number: int) -> int:
    """The row of a global row within its dataset, from 1."""
    return (number & ((1 << _ROW_BITS) - 1)) + 1


def describe_row(number: int, datasets: Sequence[str]) -> str:
    """ "17", or "alpaca_dataset 17" if there are several datasets; rows count from 1."""
    row = row_of(number)
    return str(row) if len(datasets) == 1 else f"{datasets[source_of(number)]} {row}"


@dataclass(frozen=True)
class MixPart:
    """The share of one dataset in an epoch."""

    dataset: str
    share: float  # of the epoch's samples
    num_samples: int
    num_passes: float  # over the dataset

    def __str__(self) -> str:
        return f"{self.dataset} {self.share:.3g}: {plural(self.num_samples, 'sample')}, {self.num_passes:.1f} passes"


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as shares of 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


def mix(datasets: Sequence[str], sizes: Sequence[int], weights: Sequence[float]) -> list[MixPart]:
    """The parts of the smallest epoch in which every sequence occurs and the datasets have these shares of sequences.

    That epoch has N = max(size / share) sequences, and a dataset gives round(share x N) of them. Without weights each
    gives its sequences once.

    Raises:
        ConfigError: if the shares are so unequal that the epoch would be absurd.
    """
    shares = normalized(weights or sizes)
    total = max(size / share for size, share in zip(sizes, shares, strict=True))
    if total > _MAX_SAMPLES:
        raise ConfigError(
            f"--dataset_weights: an epoch in which every sample occurs would have {total:.2g} samples; "
            "give shares that are less unequal, or fewer samples of the large dataset"
        )
    counts = [round(share * total) for share in shares]
    return [
        MixPart(name, share, count, count / size)
        for name, share, count, size in zip(datasets, shares, counts, sizes, strict=True)
    ]


def mixed_indices(sizes: Sequence[int], counts: Sequence[int], seed: int) -> np.ndarray:
    """The sequences of an epoch, as indices into the datasets end to end: int64 [sum of counts].

    Each dataset gives whole passes and, for the rest, sequences drawn by `seed`, none of them twice.
    """
    parts, start = [], 0
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        passes, rest = divmod(count, size)
        drawn = np.random.default_rng([seed, source]).choice(size, size=rest, replace=False)
        parts += [np.tile(np.arange(size), passes) + start, np.sort(drawn) + start]
        start += size
    return np.concatenate(parts).astype(np.int64)


def join_sequences(parts: Sequence[Sequences]) -> Sequences:
    """The sequences of several datasets end to end; the source row of each holds its dataset."""
    if len(parts) == 1:
        return parts[0]
    offsets = _join_offsets([part.offsets for part in parts])
    are_apart = any(part.label_offsets is not part.offsets for part in parts)
    counts = [field.name for field in fields(Sequences) if field.name.startswith("num_")]
    return type(parts[0])(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        offsets=offsets,
        label_offsets=_join_offsets([part.label_offsets for part in parts]) if are_apart else offsets,
        source_rows=np.concatenate([part.source_rows + global_row(i, 0) for i, part in enumerate(parts)]),
        labels_are_tokens=parts[0].labels_are_tokens,
        length_flags=parts[0].length_flags,
        of_tokens=_join_arrays(parts),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
        **parts[0].more_of_joined(parts),
    )


def _join_arrays(parts: Sequence[Sequences]) -> dict[str, np.ndarray]:
    try:
        return end_to_end([part.of_tokens for part in parts], [len(part.input_ids) for part in parts])
    except BadExample as error:
        raise ConfigError(f"--dataset: of the datasets in a mix, {error}") from error


def _join_offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    starts = np.cumsum([0, *(part[-1] for part in parts)])
    return np.concatenate([*(part[:-1] + start for part, start in zip(parts, starts, strict=False)), starts[-1:]])


class Interleaved(Generic[T]):
    """Items of several sources, the source of each drawn at random.

    Args:
        sources: each, called with n, gives its items from the first, for the n-th time (from 0). None may be empty.
        weights: a source is drawn in proportion to its weight; one that ends starts again, until every source has ended
            once. Without weights, sources are drawn evenly and end once: every item comes exactly once.
    """

    def __init__(
        self, sources: Sequence[Callable[[int], Iterable[T]]], weights: Sequence[float], rng: np.random.Generator
    ) -> None:
        self.sources, self.weights = sources, weights
        shares = normalized(weights or [1.0] * len(sources))
        self._draws = Draws(rng, lambda rng: rng.choice(len(sources), size=1024, p=shares).tolist())
        self._num_starts = [1] * len(sources)
        self._unfinished = set(range(len(sources)))

    def __iter__(self) -> Iterator[T]:
        starts, unfinished = self._num_starts, self._unfinished
        iterators = [iter(source(num - 1)) for source, num in zip(self.sources, starts, strict=True)]
        while unfinished:
            source = next(self._draws)
            if not self.weights and source not in unfinished:
                continue
            items = list(islice(iterators[source], 1))
            if not items:
                unfinished.discard(source)
                if not unfinished:
                    return
                if not self.weights:
                    continue
                iterators[source] = iter(self.sources[source](starts[source]))
                starts[source] += 1
                items = [next(iterators[source])]
            yield items[0]

    def state(self) -> dict[str, Any]:
        return {
            "draws": self._draws.state(),
            "num_starts": list(self._num_starts),
            "unfinished": sorted(self._unfinished),
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the sources have to continue by themselves."""
        self._draws.go_on(state["draws"])
        self._num_starts, self._unfinished = list(state["num_starts"]), set(state["unfinished"])
