"""Training data read as it is needed: one stream of global batches, the same on every rank.

Every rank reads, tokenises and packs the whole stream and keeps its own rows of each global batch. So ranks never
talk about data, and the rows of step s depend on seed and global batch size alone, as they do without streaming.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count, islice
from typing import Any

import datasets
import numpy as np

import data.dataset_functions  # noqa: F401  (a reading process that is spawned finds recipes through its import hook)
from data.labels import IGNORE_INDEX
from data.loader import Document
from data.mixing import global_row, interleave, source_of
from data.sequences import Examples, Truncation, build_examples, check_token_ids
from data.stream_rows import Row, batched_by_length, in_batches, packed, shuffled
from utils.errors import ConfigError, in_one_line

BLOCK = 256  # rows of the data that are checked together
HEAD = 64  # rows of the data that are looked at before the run starts


@dataclass
class StreamSource:
    """One dataset, read from its first row as often as needed."""

    dataset: str  # its name, for messages
    recipe: Callable[..., Any]
    dataset_config: Any
    tokenizer: Any
    split: str
    context_length: int
    vocab_size: int
    truncation: Truncation = "right"
    max_rows: int | None = None
    kept: Any = field(default=None, repr=False)  # what the recipe returned, where it can be read again

    def __getstate__(self) -> dict[str, Any]:
        """For a reading process that is spawned: it asks the recipe itself, whose rows may not be picklable."""
        return self.__dict__ | {"kept": None}

    @property
    def name(self) -> str:
        return f"{getattr(self.recipe, '__name__', 'recipe')}, split {self.split!r}"

    def blocks(self, epoch: int, size: int = BLOCK) -> Iterator[Examples]:
        """The documents, checked, from the first row of the data.

        Args:
            epoch: told to what can shuffle itself by it (`set_epoch`, as Hugging Face datasets have).

        Raises:
            ConfigError: where the recipe fails, or returns what cannot be trained on.
        """
        first_row, num_samples = 0, 0
        try:
            rows = islice(self._rows(epoch), self.max_rows)
            while block := list(islice(rows, size)):
                name, length = self.name, self.context_length
                examples = build_examples(
                    block,
                    name=name,
                    context_length=length,
                    truncation=self.truncation,
                    first_row=first_row,
                    is_part=True,
                )
                check_token_ids(examples, self.vocab_size, self.name)
                yield examples
                first_row += len(block)
                num_samples += len(examples)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # the recipe's own code runs here
            raise ConfigError(f"dataset ({self.name}), after row {first_row}: {_reason(error)}") from error
        if not num_samples:
            raise ConfigError(
                f"dataset ({self.name}): none of its {first_row} rows has a token to learn within context_length "
                f"{self.context_length}; check the path, the split and the labels, or raise --context_length"
            )

    def _rows(self, epoch: int) -> Iterator[Mapping[str, Any]]:
        rows = self.kept
        if rows is None:
            rows = self.recipe(self.dataset_config, self.tokenizer, self.split)
            if not isinstance(rows, Iterable):
                what = "nothing" if rows is None else type(rows).__name__
                raise ConfigError(f"dataset ({self.name}): the function returned {what}; return an iterable of rows")
            if not isinstance(rows, Iterator):  # a generator can be read once; the recipe makes another
                self.kept = rows
        if hasattr(rows, "set_epoch"):
            rows.set_epoch(epoch)
        return iter(rows)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {in_one_line(error.__cause__ or error)}"


class PassCounts:
    """What a pass over the stream has given so far."""

    def __init__(self, datasets: tuple[str, ...]) -> None:
        self.datasets = datasets
        self.num_samples: Counter[int] = Counter()  # trained on, by dataset
        self.num_rows = self.num_tokens = self.num_label_tokens = 0
        self.checks: Counter[str] = Counter()  # what the checks of the documents counted

    def add_checks(self, examples: Examples) -> None:
        names = [field.name for field in fields(examples) if field.name.startswith("num_")]
        self.checks.update({name: getattr(examples, name) for name in names})

    def add_rows(self, rows: list[Row]) -> None:
        self.num_rows += len(rows)
        for row in rows:
            for ids, labels, number in row:
                self.num_samples[source_of(number)] += 1
                self.num_tokens += len(ids)
                self.num_label_tokens += int(np.count_nonzero(labels != IGNORE_INDEX))

    def describe(self, row_length: int | None) -> str:
        """Samples, by dataset where there are several, rows and how full they are, and what the checks found."""
        total = sum(self.num_samples.values())
        parts = [f"{total:,} samples"]
        if len(self.datasets) > 1:
            shares = [f"{name} {self.num_samples[i]:,}" for i, name in enumerate(self.datasets)]
            parts[0] += f" ({', '.join(shares)})"
        parts.append(f"{self.num_tokens:,} tokens, {self.num_label_tokens:,} of them learned")
        fill = f", {100 * self.num_tokens / (self.num_rows * row_length):.1f} % full" if row_length else ""
        parts.append(f"{self.num_rows:,} rows{fill}")
        parts += [f"{name.removeprefix('num_').replace('_', ' ')} {n:,}" for name, n in self.checks.items() if n]
        return "; ".join(parts)


@dataclass(frozen=True)
class Stream:
    """The training data of a streamed run."""

    sources: tuple[StreamSource, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle_buffer_size: int
    packing: bool
    context_length: int
    num_steps: int  # of the run

    def head(self) -> list[Examples]:
        """The first documents of each source, as they lie there.

        Raises:
            ConfigError: where they cannot be trained on.
        """
        return [next(source.blocks(0, HEAD)) for source in self.sources]

    def describe(self, head: Sequence[Examples]) -> list[str]:
        """How the data is read and what its shuffle buffer will hold, by the length of the first documents."""
        num_samples = max(1, sum(map(len, head)))
        mean_tokens = sum(len(part.input_ids) for part in head) / num_samples
        mib = self.shuffle_buffer_size * (8 * mean_tokens + 400) / 2**20  # two int32 arrays, and Python's own
        lines = [
            f"train: streamed, drawn from {self.shuffle_buffer_size:,} samples at a time (at {mean_tokens:,.0f} tokens "
            f"each, as the first {num_samples} have, {mib:,.0f} MiB of host memory on every rank)"
        ]
        lines += [
            f"train: the function of {source.dataset} returned a {type(rows).__name__}, which is in memory as a whole; "
            "return a generator or an IterableDataset to stream"
            for source in self.sources
            if isinstance(rows := source.kept, Sequence) or isinstance(rows, datasets.Dataset)
        ]
        return lines

    def steps(self, global_batch_size: int) -> Iterator[tuple[list[Row], tuple[str, ...]]]:
        """The rows of each optimizer step, and what there is to say before it.

        A pass over the data ends with a smaller batch where its rows do not fill the last one, as an epoch does.
        """
        row_length = self.context_length if self.packing else None
        lines: list[str] = []
        step = 0
        for number in count():
            counts = PassCounts(tuple(source.dataset for source in self.sources))
            for rows in self._pass(number, global_batch_size, counts):
                step += 1
                counts.add_rows(rows)
                if step == self.num_steps:
                    lines.append(f"stream: in pass {number + 1} at the end: {counts.describe(row_length)}")
                yield rows, tuple(lines)
                lines = []
                if step == self.num_steps:
                    return
            lines.append(f"stream: pass {number + 1} ended at step {step}: {counts.describe(row_length)}")

    def _pass(self, number: int, global_batch_size: int, counts: PassCounts) -> Iterator[list[Row]]:
        """Global batches of one pass over the data."""
        mixing, shuffling, batching = (np.random.default_rng([self.seed, number, use]) for use in range(3))
        sources = [partial(self._documents, index, number, counts) for index in range(len(self.sources))]
        documents = shuffled(interleave(sources, self.weights, mixing), self.shuffle_buffer_size, shuffling)
        if self.packing:
            return in_batches(packed(documents, self.context_length), global_batch_size)
        return batched_by_length(documents, global_batch_size, batching)

    def _documents(self, index: int, number: int, counts: PassCounts, num_starts: int) -> Iterator[Document]:
        for examples in self.sources[index].blocks(number + num_starts):
            for place, row in enumerate(examples.source_rows.tolist()):
                ids, labels = examples.document(place)
                # Copies: a part of the block's arrays would keep the whole block while it waits in the buffer.
                yield ids.copy(), labels.copy(), global_row(index, row)
            counts.add_checks(examples)


def fingerprint(head: Iterable[Examples]) -> int:
    """A number that differs where the documents differ."""
    value = 0
    for examples in head:
        value = zlib.crc32(examples.labels.tobytes(), zlib.crc32(examples.input_ids.tobytes(), value))
    return value
