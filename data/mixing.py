"""Several datasets in one run: how many samples of each make an epoch, which ones, and where a sample came from.

A sample's row of the data is one number: the row in the low bits and its dataset, by its place in `--dataset`, above
them. With one dataset it is the row itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TypeVar

import numpy as np

from data.sequences import Examples
from utils.errors import ConfigError

T = TypeVar("T")

_ROW_BITS = 48
_MAX_SAMPLES = 2**31


def global_row(source: int, row: int) -> int:
    """The number of a row of the data among those of all datasets; both count from 0."""
    return source << _ROW_BITS | row


def source_of(number: int) -> int:
    """The dataset of a global row, by its place in `--dataset`."""
    return number >> _ROW_BITS


def describe_row(number: int, datasets: Sequence[str]) -> str:
    """ "17", or "alpaca_dataset 17" where there are several datasets; rows count from 1."""
    row = (number & ((1 << _ROW_BITS) - 1)) + 1
    return str(row) if len(datasets) == 1 else f"{datasets[source_of(number)]} {row}"


@dataclass(frozen=True)
class MixPart:
    """What one dataset gives to an epoch."""

    dataset: str
    share: float  # of the epoch's samples
    num_samples: int
    num_passes: float  # over the dataset

    def __str__(self) -> str:
        return f"{self.dataset} {self.share:.3g}: {self.num_samples:,} samples, {self.num_passes:.1f} passes"


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights as shares of 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


def mix(datasets: Sequence[str], sizes: Sequence[int], weights: Sequence[float]) -> list[MixPart]:
    """The parts of the smallest epoch in which every sample occurs and the datasets have these shares of samples.

    That epoch has N = max(size / share) samples, and a dataset gives round(share x N) of them. Without weights each
    gives its samples once.

    Raises:
        ConfigError: where the shares are so unequal that the epoch would be absurd.
    """
    shares = normalised(weights or sizes)
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


def mixed_documents(sizes: Sequence[int], counts: Sequence[int], seed: int) -> np.ndarray:
    """Which documents an epoch holds, as indices into the datasets laid end to end: int64 [sum of counts].

    Each dataset gives whole passes and, for the rest, documents drawn by `seed`, none of them twice.
    """
    parts, start = [], 0
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        passes, rest = divmod(count, size)
        drawn = np.random.default_rng([seed, source]).choice(size, size=rest, replace=False)
        parts += [np.tile(np.arange(size), passes) + start, np.sort(drawn) + start]
        start += size
    return np.concatenate(parts).astype(np.int64)


def join_examples(parts: Sequence[Examples]) -> Examples:
    """The documents of several datasets end to end; each knows its dataset by its row's number."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.input_ids) for part in parts)])
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
    counts = [field.name for field in fields(Examples) if field.name.startswith("num_")]
    return Examples(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        offsets=np.concatenate([*offsets, starts[-1:]]),
        source_rows=np.concatenate([part.source_rows + global_row(i, 0) for i, part in enumerate(parts)]),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )


def interleave(
    sources: Sequence[Callable[[int], Iterator[T]]], weights: Sequence[float], rng: np.random.Generator
) -> Iterator[T]:
    """Items of several sources, the source of each drawn at random.

    Args:
        sources: each gives its items from the first, for the n-th time (from 0). None may be empty.
        weights: with them a source is drawn in proportion to its weight and starts again where it ends, until every
            source has ended once. Without, sources are drawn evenly and end once: every item comes exactly once.
    """
    shares = normalised(weights or [1.0] * len(sources))
    num_starts = [1] * len(sources)
    iterators = [source(0) for source in sources]
    unfinished = set(range(len(sources)))
    while True:
        for source in rng.choice(len(sources), size=1024, p=shares).tolist():
            if not weights and source not in unfinished:
                continue
            items = list(islice(iterators[source], 1))
            if not items:
                unfinished.discard(source)
                if not unfinished:
                    return
                if not weights:
                    continue
                iterators[source] = sources[source](num_starts[source])
                num_starts[source] += 1
                items = [next(iterators[source])]
            yield items[0]
