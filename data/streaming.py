"""Training data read as it is needed: one stream of global batches, the same on every rank.

Every rank reads and packs the whole stream and keeps its own rows of each global batch. So the rows of step s depend on
seed and global batch size alone, as without streaming. Ranks of one machine share the tokenising (`data.block_share`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count, islice
from typing import Any

import datasets
import numpy as np
import psutil

from data.block_share import BlockShare
from data.dataset_functions import accepted_options  # a spawned worker finds dataset files through its import hook
from data.encoding import ONE_TEXT, Encode
from data.labels import IGNORE_INDEX
from data.mixing import global_row, interleave, source_of
from data.order import batched_by_length, in_batches, shuffled
from data.packing import pack_stream
from data.sequences import Row, Sequences, TokenSequence, check_token_ids
from data.tokenized_stream import RowBatch, TokenizedStream
from data.user_errors import RAISED, failed, file_of
from utils.errors import ConfigError

BLOCK = 256  # rows that are checked together
HEAD = 64  # rows that are checked before the run starts


@dataclass
class StreamSource:
    """One dataset, read from its first row as often as needed."""

    dataset: str  # its name, for messages
    function: Callable[..., Any]
    dataset_config: Any
    tokenizer: Any
    split: str
    build: Callable[..., Sequences]  # makes sequences of a block of rows
    vocab_size: int
    max_rows: int | None = None
    encode: Encode = ONE_TEXT
    share: BlockShare | None = None  # with the other processes of the machine
    kept: Any = field(default=None, repr=False)  # what the function returned, if it can be read again

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker: it calls the function itself, since the rows may not be picklable."""
        return self.__dict__ | {"kept": None}

    @property
    def name(self) -> str:
        return f"{getattr(self.function, '__name__', 'function')}, split {self.split!r}"

    def blocks(self, epoch: int, size: int = BLOCK) -> Iterator[Sequences]:
        """Blocks of checked sequences, from the first row of the data.

        Args:
            epoch: passed to `set_epoch` of the rows, if they have it, as Hugging Face datasets do.

        Raises:
            ConfigError: if the function fails, or returns rows that cannot be trained on.
        """
        num_rows = num_sequences = 0

        def count(batches: Iterator[RowBatch]) -> Iterator[RowBatch]:
            nonlocal num_rows
            for batch in batches:
                num_rows = batch.first_row + batch.num_rows
                yield batch

        try:
            rows = self._rows(epoch)
            if isinstance(rows, TokenizedStream):
                if self.share is not None:
                    batches = count(rows.shared().batches(size, self.max_rows))
                    blocks = self.share.in_turn(batches, self._sequences)
                else:
                    blocks = map(self._sequences, count(rows.batches(size, self.max_rows)))
            else:  # it tokenises while it is read
                blocks = map(self._sequences, count(_in_batches(islice(iter(rows), self.max_rows), size)))
            for sequences in blocks:
                yield sequences
                num_sequences += len(sequences)
        except ConfigError:
            raise
        except RAISED as error:  # the function's own code runs here
            raise self._failed(num_rows, error) from error
        if not num_sequences:
            raise ConfigError(
                f"dataset ({self.name}): none of its {num_rows} rows has a label token within the context length; "
                "check the path, the split and the labels, or raise --context_length"
            )

    def _sequences(self, batch: RowBatch) -> Sequences:
        try:
            sequences = self.build(batch.rows(), name=self.name, first_row=batch.first_row, is_part=True)
        except ConfigError:
            raise
        except RAISED as error:
            raise self._failed(batch.first_row, error) from error
        check_token_ids(sequences, self.vocab_size, self.name)
        return sequences

    def _failed(self, row: int, error: BaseException) -> ConfigError:
        return failed(f"dataset ({self.name}), after row {row}", error, file_of(self.function))

    def _rows(self, epoch: int) -> Iterable[Mapping[str, Any]]:
        rows = self.kept
        if rows is None:
            options = accepted_options(self.function, encode=self.encode)
            rows = self.function(self.dataset_config, self.tokenizer, self.split, **options)
            if not isinstance(rows, Iterable):
                what = "nothing" if rows is None else type(rows).__name__
                raise ConfigError(f"dataset ({self.name}): the function returned {what}; return an iterable of rows")
            if not isinstance(rows, Iterator):  # a generator can be read once; the function makes another
                self.kept = rows
        if hasattr(rows, "set_epoch"):
            rows.set_epoch(epoch)
        return rows


def _in_batches(rows: Iterator[Mapping[str, Any]], size: int) -> Iterator[RowBatch]:
    first = 0
    while block := list(islice(rows, size)):
        yield RowBatch(first, len(block), partial(list, block))
        first += len(block)


class PassCounts:
    """Counts of what a pass over the stream has given so far."""

    def __init__(self, datasets: tuple[str, ...]) -> None:
        self.datasets = datasets
        self.num_samples: Counter[int] = Counter()  # trained on, by dataset
        self.num_rows = self.num_tokens = self.num_label_tokens = 0
        self.checks: Counter[str] = Counter()  # sequences that were cut or left out

    def add_checks(self, sequences: Sequences) -> None:
        names = [field.name for field in fields(sequences) if field.name.startswith("num_")]
        self.checks.update({name: getattr(sequences, name) for name in names})

    def add_rows(self, rows: list[Row]) -> None:
        self.num_rows += len(rows)
        for row in rows:
            for sequence in row:
                self.num_samples[source_of(sequence.source_row)] += 1
                self.num_tokens += len(sequence.input_ids)
                self.num_label_tokens += int(np.count_nonzero(sequence.labels != IGNORE_INDEX))

    def describe(self, row_length: int | None) -> str:
        """Samples, by dataset if there are several; tokens; rows and how full they are; what was cut or left out."""
        total = sum(self.num_samples.values())
        parts = [f"{total:,} samples"]
        if len(self.datasets) > 1:
            shares = [f"{name} {self.num_samples[i]:,}" for i, name in enumerate(self.datasets)]
            parts[0] += f" ({', '.join(shares)})"
        parts.append(f"{self.num_tokens:,} tokens, {self.num_label_tokens:,} of them label tokens")
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

    @property
    def share(self) -> BlockShare | None:
        return self.sources[0].share

    def shared(self, share: BlockShare | None) -> Stream:
        """This stream, its blocks tokenised in turn with the other processes of the machine."""
        return replace(self, sources=tuple(replace(source, share=share) for source in self.sources))

    def head(self) -> list[Sequences]:
        """The first sequences of each source, in the order of the data; rows without a label give none.

        Raises:
            ConfigError: if they cannot be trained on.
        """
        return [next(filter(len, source.blocks(0, HEAD))) for source in self.sources]

    def describe(self, head: Sequence[Sequences]) -> list[str]:
        """Lines on how the data is read and what its shuffle buffer will hold, judged by the first sequences.

        Raises:
            ConfigError: if the buffer is larger than host memory.
        """
        num_samples = max(1, sum(map(len, head)))
        mean_tokens = sum(len(part.input_ids) for part in head) / num_samples
        num_bytes = self.shuffle_buffer_size * (8 * mean_tokens + 400)  # two int32 arrays and Python's overhead
        size = f"at {mean_tokens:,.0f} tokens each, as the first {num_samples} have, {num_bytes / 2**20:,.0f} MiB"
        if num_bytes > psutil.virtual_memory().total:
            raise ConfigError(
                f"--shuffle_buffer_size: {self.shuffle_buffer_size:,} samples ({size}) are more than host memory; "
                "give fewer"
            )
        lines = [
            f"train: streamed, drawn from {self.shuffle_buffer_size:,} samples at a time ({size} of host memory on "
            "every rank)"
        ]
        lines += [
            f"train: the function of {source.dataset} returned a {type(rows).__name__}, which is in memory as a whole; "
            "return a generator or an IterableDataset to stream"
            for source in self.sources
            if isinstance(rows := source.kept, Sequence) or isinstance(rows, datasets.Dataset)
        ]
        return lines

    def steps(self, global_batch_size: int) -> Iterator[tuple[list[Row], tuple[str, ...]]]:
        """The rows of each optimizer step, and the lines to print before it.

        The last batch of a pass over the data may be smaller, as in an epoch.
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
        sources = [partial(self._sequences, index, number, counts) for index in range(len(self.sources))]
        sequences = shuffled(interleave(sources, self.weights, mixing), self.shuffle_buffer_size, shuffling)
        if self.packing:
            return in_batches(pack_stream(sequences, self.context_length), global_batch_size)
        return batched_by_length(sequences, global_batch_size, batching)

    def _sequences(self, index: int, number: int, counts: PassCounts, num_starts: int) -> Iterator[TokenSequence]:
        for block in self.sources[index].blocks(number + num_starts):
            for sequence in block:
                # Copies: a slice of the block's arrays would keep the whole block alive while it waits in the buffer.
                yield sequence._replace(
                    input_ids=sequence.input_ids.copy(),
                    labels=sequence.labels.copy(),
                    source_row=global_row(index, sequence.source_row),
                )
            counts.add_checks(block)
