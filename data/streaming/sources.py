"""Training data read as it is needed: the sources of a stream, which give checked sequences block by block.

`data.streaming.passes` mixes and packs them, `data.streaming.steps` goes on from pass to pass, and each rank keeps its
own rows of every global batch (`data.streaming.loader`). All ranks read the whole stream, so the rows of step s depend
on seed and global batch size alone, as without streaming. Ranks of one machine share the tokenizing
(`data.streaming.block_share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from data.dataset_functions.importing import (
    accepted_options,  # a spawned worker finds dataset files through its import hook
)
from data.dataset_functions.user_errors import RAISED, failed, file_of
from data.files.row_stream import RowPlace, RowStream
from data.sequences.tokenized import Sequences, check_token_ids
from data.streaming.block_share import BlockShare
from data.streaming.tokenized_stream import RowBatch, TokenizedStream
from data.tokens.encoding import ONE_TEXT, Encode
from utils.errors import ConfigError
from utils.host_memory import host_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 256  # rows that are checked together
HEAD = 64  # rows that are checked before the run starts


@dataclass
class StreamSource:
    """One dataset, read from its first row as often as needed."""

    dataset: str  # its name, for messages
    function: Callable[..., Any]
    dataset_config: Any
    tokenizer: PreTrainedTokenizerBase
    split: str
    build: Callable[..., Sequences]  # makes sequences of a block of rows
    vocab_size: int
    max_rows: int | None = None
    encode: Encode = ONE_TEXT
    share: BlockShare | None = None  # with the other processes of the machine
    kept: Any = field(default=None, repr=False)  # what the function returned, if it can be read again
    known_identity: list[list[int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker: it calls the function itself, since the rows may not be picklable."""
        return self.__dict__ | {"kept": None}

    @property
    def name(self) -> str:
        return f"{getattr(self.function, '__name__', 'function')}, split {self.split!r}"

    def blocks(self, epoch: int, size: int | None = None) -> Iterator[Sequences]:
        """Blocks of checked sequences, from the first row of the data (see `placed_blocks`)."""
        return (sequences for _, sequences in self.placed_blocks(epoch, size))

    def placed_blocks(
        self, epoch: int, size: int | None = None, *, start: tuple[int, RowPlace] | None = None
    ) -> Iterator[tuple[RowBatch, Sequences]]:
        """Blocks of checked sequences, each with the rows that it was made of.

        Args:
            epoch: passed to `set_epoch` of the rows, if they have it, as Hugging Face datasets do.
            size: rows of a block; unset: `BLOCK`.
            start: the number and the place of a block's first row, to begin with this block.

        Raises:
            ConfigError: if the function fails, or returns rows that cannot be trained on.
        """
        size = size or BLOCK
        num_rows = num_sequences = 0

        def count(batches: Iterator[RowBatch]) -> Iterator[RowBatch]:
            nonlocal num_rows
            for batch in batches:
                num_rows = batch.first_row + batch.num_rows
                yield batch

        try:
            rows = self._rows()
            if isinstance(rows, TokenizedStream):
                rows = rows if self.share is None else rows.shared()
                batches = count(rows.batches(size, self.max_rows, epoch=epoch, start=start))
                blocks = self._in_turn(batches, self._sequences)
            else:  # it tokenizes while it is read
                if hasattr(rows, "set_epoch"):
                    rows.set_epoch(epoch)
                batches = count(_in_batches(islice(iter(rows), self.max_rows), size))
                blocks = ((batch, self._sequences(batch)) for batch in batches)
            for batch, sequences in blocks:
                yield batch, sequences
                num_sequences += len(sequences)
        except ConfigError:
            raise
        except RAISED as error:  # the function's own code runs here
            raise self._failed(num_rows, error) from error
        if not num_sequences and start is None:
            raise ConfigError(
                f"dataset ({self.name}): none of its {num_rows} rows has a label token within the context length: "
                "answers are empty, or begin after it; check the data, or raise --context_length"
            )

    def check_files(self) -> None:
        """Check the first rows of later files, which would end the run when it came to them. The head was read.

        Raises:
            ConfigError: naming the file.
        """
        if self.max_rows is None and isinstance(self.kept, TokenizedStream):
            try:
                self.kept.check_files()
            except ConfigError:
                raise
            except RAISED as error:
                raise self._failed(0, error) from error

    def picked(self, blocks: Sequence[tuple[int, RowPlace, Sequence[int]]]) -> Iterator[Sequences]:
        """The sequences of some rows of each of these blocks.

        Args:
            blocks: of each the number of its first row, its place, and which of its rows.
        """
        rows = self._rows()
        assert isinstance(rows, TokenizedStream)
        rows = rows if self.share is None else rows.shared()
        numbers = [first + np.array(wanted, dtype=np.int64) for first, _, wanted in blocks]
        found = self._in_turn(rows.picked(blocks), self._sequences_of_some)
        for number, (_, sequences) in zip(numbers, found, strict=True):
            yield replace(sequences, source_rows=number[sequences.source_rows])

    @property
    def places(self) -> RowStream | None:
        """Its rows, if they can be read from any place on."""
        rows = self._rows()
        return rows.places if isinstance(rows, TokenizedStream) else None

    def identity(self) -> list[list[int]]:
        """A fingerprint of its files; read once."""
        if self.known_identity is None:
            places = self.places
            self.known_identity = [] if places is None else places.identity()
        return self.known_identity

    def _in_turn(
        self, batches: Iterator[RowBatch], work: Callable[[RowBatch], Sequences]
    ) -> Iterator[tuple[RowBatch, Sequences]]:
        if self.share is not None:
            return self.share.in_turn(batches, work)
        return ((batch, work(batch)) for batch in batches)

    def _sequences(self, batch: RowBatch) -> Sequences:
        try:
            sequences = self.build(batch.rows(), name=self.name, first_row=batch.first_row, is_part=True)
        except ConfigError:
            raise
        except RAISED as error:
            raise self._failed(batch.first_row, error) from error
        check_token_ids(sequences, self.vocab_size, self.name)
        return sequences

    def _sequences_of_some(self, batch: RowBatch) -> Sequences:
        """The rows of the sequences count from 0, as they come."""
        return self._sequences(batch._replace(first_row=0))

    def _failed(self, row: int, error: BaseException) -> ConfigError:
        return failed(f"dataset ({self.name}), after row {row}", error, file_of(self.function))

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        rows = self.kept
        if rows is None:
            options = accepted_options(self.function, encode=self.encode)
            rows = self.function(self.dataset_config, self.tokenizer, self.split, **options)
            if not isinstance(rows, Iterable):
                what = "nothing" if rows is None else type(rows).__name__
                raise ConfigError(f"dataset ({self.name}): the function returned {what}; return an iterable of rows")
            if not isinstance(rows, Iterator):  # a generator can be read once; the function makes another
                self.kept = rows
        return rows


def _in_batches(rows: Iterator[Mapping[str, Any]], size: int) -> Iterator[RowBatch]:
    first = 0
    while block := list(islice(rows, size)):
        yield RowBatch(first, len(block), partial(list, block))
        first += len(block)


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
        """This stream, its blocks tokenized in turn with the other processes of the machine."""
        return replace(self, sources=tuple(replace(source, share=share) for source in self.sources))

    def head(self) -> list[Sequences]:
        """The first sequences of each source, in the order of the data; rows without a label give none.

        Raises:
            ConfigError: if they cannot be trained on.
        """
        heads = [next(filter(len, source.blocks(0, HEAD))) for source in self.sources]
        for source in self.sources:
            source.check_files()
        return heads

    def describe(self, head: Sequence[Sequences]) -> list[str]:
        """Lines on how the data is read and what its shuffle buffer will hold, judged by the first sequences.

        Raises:
            ConfigError: if the buffer is larger than host memory.
        """
        num_samples = max(1, sum(map(len, head)))
        mean_tokens = sum(len(part.input_ids) for part in head) / num_samples
        held = sum(part.num_bytes_held for part in head) / num_samples
        num_bytes = self.shuffle_buffer_size * (8 * mean_tokens + 400 + held)  # two int32 arrays, Python's overhead
        size = f"at {mean_tokens:,.0f} tokens each, as the first {num_samples} have, {num_bytes / 2**20:,.0f} MiB"
        if num_bytes > host_bytes():
            raise ConfigError(
                f"--shuffle_buffer_size: {self.shuffle_buffer_size:,} samples ({size}) are more than host memory; "
                "give fewer"
            )
        lines = [
            f"train: streamed, drawn from {self.shuffle_buffer_size:,} samples at a time ({size} of host memory on "
            "every rank)"
        ]
        lines += [line for part in head for line in part.figures("the first training samples")]
        lines += [
            f"train: the function of {source.dataset} returned a {type(rows).__name__}, which is in memory as a whole; "
            "return a generator or an IterableDataset to stream"
            for source in self.sources
            if isinstance(rows := source.kept, Sequence) or isinstance(rows, datasets.Dataset)
        ]
        return lines
