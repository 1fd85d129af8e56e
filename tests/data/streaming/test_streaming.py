"""A stream of rows: what the data holds, once per pass, the same however it is cut."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from data.batches.layout import BatchLayout
from data.batches.mixing import source_of
from data.batches.order import BatchesByLength, Shuffled
from data.batches.packing import PackedStream
from data.sequences.causal import build_sequences
from data.sequences.tokenized import Row, TokenSequence, checksum
from data.streaming.loader import StreamLoader
from data.streaming.sources import Stream, StreamSource
from data.streaming.steps import StreamSteps
from utils.errors import ConfigError, TrainingError

CONTEXT = 16


def source(lengths: list[int], *, function: Any = None, name: str = "a", max_rows: int | None = None) -> StreamSource:
    """Sequences of these lengths; the tokens of each are its number, the labels the next number."""

    def rows(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
        return [{"input_ids": [index] * length, "labels": [index + 1] * length} for index, length in enumerate(lengths)]

    return StreamSource(
        dataset=name,
        function=function or rows,
        dataset_config=None,
        tokenizer=None,
        split="train",
        build=partial(build_sequences, context_length=CONTEXT),
        vocab_size=10_000,
        max_rows=max_rows,
    )


def stream(
    *sources: StreamSource, num_steps: int = 10**6, packing: bool = True, buffer_size: int = 7, **options: Any
) -> Stream:
    given: dict[str, Any] = {"weights": (), "seed": 1} | options
    return Stream(
        sources=sources,
        shuffle_buffer_size=buffer_size,
        packing=packing,
        context_length=CONTEXT,
        num_steps=num_steps,
        **given,
    )


def take_pass(stream: Stream, global_batch_size: int, number: int = 0) -> list[list[Row]]:
    """The steps of one pass; a step with lines to print begins the next pass."""
    found: list[list[Row]] = []
    passes = 0
    for rows, lines in StreamSteps(stream, global_batch_size):
        passes += bool(lines)
        if passes > number:
            return found
        if passes == number:
            found.append(rows)
    raise AssertionError("the stream ended")


def numbers(steps: list[list[Row]]) -> list[int]:
    return [number for rows in steps for row in rows for _, _, number in row]


def collate(rows: list[Row]) -> tuple[Any, ...]:
    """A micro-batch as plain numbers."""
    return tuple(tuple((tuple(ids.tolist()), number) for ids, _, number in row) for row in rows)


def loaded(stream: Stream, layout: BatchLayout, num_workers: int = 0, first_step: int = 0) -> list[list[Any]]:
    """Per step, the rows of all ranks in the order of the global batch."""
    ranks = [
        list(
            StreamLoader(
                stream, layout, rank=rank, collate=collate, num_workers=num_workers, say=lambda line: None
            ).epoch(0, first_step)
        )
        for rank in range(layout.data_parallel_size)
    ]
    for shares in zip(*ranks, strict=True):
        assert len({len(share) for share in shares}) == 1, "every rank makes the same number of micro-batches"
    return [
        [row for micro in zip(*shares, strict=True) for part in micro for row in part]
        for shares in zip(*ranks, strict=True)
    ]


LENGTHS = st.lists(st.integers(2, CONTEXT + 4), min_size=1, max_size=50)


@drawn(
    lengths=LENGTHS,
    packing=st.booleans(),
    global_batch_size=st.integers(1, 6),
    buffer_size=st.integers(1, 60),
    number=st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_every_sequence_comes_exactly_once_per_pass_whole_and_in_order(
    lengths: list[int], packing: bool, global_batch_size: int, buffer_size: int, number: int
) -> None:
    steps = take_pass(stream(source(lengths), packing=packing, buffer_size=buffer_size), global_batch_size, number)
    assert sorted(numbers(steps)) == list(range(len(lengths)))
    for rows in steps:
        for row in rows:
            assert sum(len(ids) for ids, _, _ in row) <= CONTEXT
            for ids, labels, place in row:
                length = min(CONTEXT, lengths[place])
                assert ids.tolist() == [place] * length
                assert labels.tolist() == [-100] + [place + 1] * (length - 1)
    sizes = [len(rows) for rows in steps]
    assert sizes[:-1] == [global_batch_size] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= global_batch_size
    assert packing or all(len(row) == 1 for rows in steps for row in rows)


@drawn(lengths=LENGTHS, packing=st.booleans(), global_batch_size=st.sampled_from([4, 6, 12]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_rows_of_a_step_are_the_same_for_any_cut_of_the_global_batch(
    lengths: list[int], packing: bool, global_batch_size: int, data: st.DataObject
) -> None:
    cuts = [
        BatchLayout(micro, global_batch_size // (micro * ranks), ranks)
        for ranks in (1, 2, 3, 4)
        for micro in range(1, global_batch_size + 1)
        if global_batch_size % (micro * ranks) == 0
    ]
    given_stream = stream(source(lengths), packing=packing, num_steps=9)
    whole = loaded(given_stream, BatchLayout(global_batch_size, 1, 1))
    assert len(whole) == 9
    assert loaded(given_stream, data.draw(st.sampled_from(cuts))) == whole


@drawn(lengths=st.lists(st.integers(2, CONTEXT), min_size=20, max_size=50), packing=st.booleans())
@settings(max_examples=50, deadline=None)
def test_order_differs_by_pass_and_seed_and_is_the_same_again(lengths: list[int], packing: bool) -> None:
    def order(seed: int, number: int) -> list[int]:
        np.random.default_rng(0).permutation(5)
        np.random.seed(number)  # other draws of random numbers must not matter
        return numbers(take_pass(stream(source(lengths), packing=packing, seed=seed), 4, number))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("first_step", [0, 1, 13])
def test_the_stream_can_be_entered_at_any_step_with_and_without_a_process(num_workers: int, first_step: int) -> None:
    given_stream = stream(source([3, 9, 5, 12, 16, 2, 7] * 4), num_steps=16)
    whole = loaded(given_stream, BatchLayout(2, 1, 2))
    assert loaded(given_stream, BatchLayout(2, 1, 2), num_workers, first_step) == whole[first_step:]
    assert len(StreamLoader(given_stream, BatchLayout(2, 1, 2), rank=0, collate=collate)) == 16


def test_an_iterable_dataset_is_read_whole_in_a_worker_process() -> None:
    """Hugging Face datasets divide their shards among the workers of a DataLoader."""

    def rows(*_: Any) -> Any:
        def make(shards: list[int]) -> Iterator[dict[str, list[int]]]:
            for shard in shards:
                yield from ({"input_ids": [shard, index], "labels": [shard, index]} for index in range(10))

        return datasets.IterableDataset.from_generator(make, gen_kwargs={"shards": [0, 1, 2]})

    given_stream = stream(source([], function=rows), packing=False, num_steps=8)
    steps = loaded(given_stream, BatchLayout(4, 1, 1), num_workers=1)
    assert steps == loaded(given_stream, BatchLayout(4, 1, 1))
    assert sorted(ids for step in steps for row in step for ids, _ in row) == sorted(
        (shard, index) for shard in range(3) for index in range(10)
    )


def lazily_mapped(*_: Any) -> Any:
    rows = datasets.Dataset.from_list([{"input_ids": [index, 5]} for index in range(6)]).to_iterable_dataset()
    return rows.map(lambda row: {"labels": row["input_ids"]})


def test_a_source_that_was_read_can_be_sent_to_a_process_that_is_spawned() -> None:
    before = source([], function=lazily_mapped)
    first = next(before.blocks(0))
    after = pickle.loads(pickle.dumps(before))
    assert next(after.blocks(0)).input_ids.tolist() == first.input_ids.tolist()


def test_a_function_that_is_a_generator_is_called_again_for_each_pass() -> None:
    calls = []

    def rows(*_: Any) -> Iterator[dict[str, list[int]]]:
        calls.append(1)
        yield from ({"input_ids": [index] * 4, "labels": [index] * 4} for index in range(12))

    given_stream = stream(source([], function=rows))
    for number in range(3):
        assert sorted(numbers(take_pass(given_stream, 2, number))) == list(range(12))
    assert len(calls) > 3


@drawn(first=LENGTHS, second=LENGTHS, weights=st.sampled_from([(), (0.7, 0.3), (1.0, 20.0)]), packing=st.booleans())
@settings(max_examples=80, deadline=None)
def test_mixed_sources_come_whole_in_a_pass_and_once_without_weights(
    first: list[int], second: list[int], weights: tuple[float, ...], packing: bool
) -> None:
    mixed = stream(source(first), source(second, name="b"), weights=weights, packing=packing)
    found = Counter(numbers(take_pass(mixed, 3)))
    for index, lengths in enumerate((first, second)):
        own = {number: times for number, times in found.items() if source_of(number) == index}
        assert len(own) == len(lengths)
        assert weights or set(own.values()) == {1}
        assert max(own.values()) - min(own.values()) <= 1


def sequence_of(length: int, row: int) -> TokenSequence:
    return TokenSequence(np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.int32), row)


def samsum_like(num_documents: int, longest: int) -> list[Any]:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(150), 0.7, num_documents), 8, longest).astype(int)
    return [sequence_of(length, index) for index, length in enumerate(lengths)]


def test_packing_on_the_fly_fills_rows() -> None:
    sequences = samsum_like(20_000, 2048)
    rows = list(PackedStream(sequences, 2048))
    assert sum(len(sequence.input_ids) for sequence in sequences) / (2048 * len(rows)) > 0.99


@pytest.mark.parametrize("global_batch_size", [8, 64])
def test_batches_of_like_lengths_have_little_padding(global_batch_size: int) -> None:
    batches = BatchesByLength(samsum_like(20_000, 2048), global_batch_size, np.random.default_rng(0))
    tokens = padded = 0
    for batch in batches:
        for start in range(0, len(batch), 4):
            lengths = [len(row[0].input_ids) for row in batch[start : start + 4]]
            tokens, padded = tokens + sum(lengths), padded + max(lengths) * len(lengths)
    assert 1 - tokens / padded < 0.1


def test_a_buffer_moves_items_far_and_holds_no_more_than_it_may() -> None:
    read: list[int] = []
    ahead = []
    order = []
    for item in Shuffled((read.append(i) or i for i in range(5000)), 500, np.random.default_rng(0)):
        order.append(item)
        ahead.append(len(read) - len(order))
    assert sorted(order) == list(range(5000))
    assert max(ahead) <= 500
    assert np.mean(np.abs(np.array(order) - np.arange(5000))) > 150


def test_no_more_rows_are_open_than_may_be() -> None:
    waiting, given_documents = 0, 0

    def sequences() -> Iterator[Any]:
        nonlocal given_documents
        for sequence in [sequence_of(length, 0) for length in [9, 10, 11, 12] * 50]:
            given_documents += 1
            yield sequence

    for row in PackedStream(sequences(), CONTEXT, num_open_rows=5):
        given_documents -= len(row)
        waiting = max(waiting, given_documents)
    assert waiting <= 6


def test_ranks_that_read_different_data_would_be_noticed_at_its_start() -> None:
    first, second = source([4, 5, 6]), source([4, 5, 7])
    assert checksum(stream(first).head()) == checksum(stream(source([4, 5, 6])).head())
    assert checksum(stream(first).head()) != checksum(stream(second).head())


def test_a_stream_may_begin_with_rows_that_cannot_be_learned() -> None:
    begins_late = stream(source([1] * 200 + [5, 6]))
    (head,) = begins_late.head()
    assert head.lengths.tolist() == [5, 6]
    assert len(begins_late.describe([head])) == 2
    assert sum(len(row) for rows in take_pass(begins_late, 4) for row in rows) == 2


# What cannot be trained on


def test_a_slice_of_a_number_of_rows_is_the_start_of_the_stream() -> None:
    assert sorted(numbers(take_pass(stream(source([4] * 600, max_rows=300)), 4))) == list(range(300))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_that_is_wrong_ends_the_run_with_one_line_that_names_it(num_workers: int) -> None:
    def rows(*_: Any) -> Iterator[Any]:
        yield from ({"input_ids": [5, 5], "labels": [5, 5]} for _ in range(700))
        yield {"input_ids": [5, 99_999], "labels": [5, 5]}

    loader = StreamLoader(
        stream(source([], function=rows)), BatchLayout(2, 1, 1), rank=0, collate=collate, num_workers=num_workers
    )
    with pytest.raises(TrainingError, match="row 701: token id 99999") as failure:
        for _ in loader.epoch(0):
            pass
    assert len(str(failure.value).splitlines()) == 1


def empty(*_: Any) -> Any:
    return iter(())


def unlearnable(*_: Any) -> Any:
    return [{"input_ids": [5, 6], "labels": [-100, -100]}]


def nothing(*_: Any) -> Any:
    return None


def broken(*_: Any) -> Any:
    yield {"input_ids": [5, 6], "labels": [5, 6]}
    raise KeyError("dialogue")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (empty, "none of its 0 rows has a label token"),
        (unlearnable, "none of its 1 rows has a label token"),
        (nothing, "the function returned nothing"),
        (broken, "after row 0: KeyError: 'dialogue'"),
    ],
)
def test_a_source_that_gives_nothing_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        for _ in source([], function=function).blocks(0):
            pass
    assert function.__name__ in str(refusal.value)
