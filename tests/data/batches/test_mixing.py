"""Several datasets in one run: shares of sequences, every sequence at least once, the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.mixing import Interleaved, describe_row, global_row, join_sequences, mix, mixed_indices, source_of
from data.sequences.causal import build_sequences
from data.sequences.tokenized import Sequences
from utils.errors import ConfigError

SIZES_AND_WEIGHTS = st.lists(
    st.tuples(st.integers(1, 60), st.floats(0.01, 10, allow_nan=False)), min_size=2, max_size=4
)


def names(sources: list[Any]) -> list[str]:
    return [f"d{index}" for index in range(len(sources))]


@given(sources=SIZES_AND_WEIGHTS, seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_an_epoch_has_the_given_shares_and_every_sequence_at_least_once(sources: list[Any], seed: int) -> None:
    sizes, weights = map(list, zip(*sources, strict=True))
    parts = mix(names(sources), sizes, weights)
    counts = [part.num_samples for part in parts]
    for part, weight in zip(parts, weights, strict=True):
        assert part.share == pytest.approx(weight / sum(weights))
        assert abs(part.num_samples - part.share * sum(counts)) <= len(sources)  # rounded by one each
    indices = mixed_indices(sizes, counts, seed)
    occurrences, start = Counter(indices.tolist()), 0
    for size, count in zip(sizes, counts, strict=True):
        own = [occurrences[start + index] for index in range(size)]
        assert sum(own) == count
        assert min(own) >= 1
        assert max(own) - min(own) <= 1, "passes are whole, and the rest is drawn without repeats"
        start += size
    assert sum(occurrences.values()) == sum(counts)


@given(sources=SIZES_AND_WEIGHTS)
@settings(max_examples=100, deadline=None)
def test_no_smaller_epoch_has_every_sequence_and_these_shares(sources: list[Any]) -> None:
    sizes, weights = map(list, zip(*sources, strict=True))
    parts = mix(names(sources), sizes, weights)
    assert any(part.num_samples == size for part, size in zip(parts, sizes, strict=True))


@given(sizes=st.lists(st.integers(1, 60), min_size=2, max_size=4))
def test_without_weights_every_sequence_comes_once(sizes: list[int]) -> None:
    counts = [part.num_samples for part in mix(names(sizes), sizes, ())]
    assert mixed_indices(sizes, counts, 0).tolist() == list(range(sum(sizes)))


def test_the_sequences_that_come_once_more_are_drawn_by_the_seed() -> None:
    first = mixed_indices([100, 10], [150, 10], 1).tolist()
    assert first == mixed_indices([100, 10], [150, 10], 1).tolist()
    assert first != mixed_indices([100, 10], [150, 10], 2).tolist()


def test_a_part_says_what_it_gives() -> None:
    parts = mix(["alpaca_dataset", "samsum_dataset"], [5200, 1000], (0.7, 0.3))
    assert [str(part) for part in parts] == [
        "alpaca_dataset 0.7: 5,200 samples, 1.0 passes",
        "samsum_dataset 0.3: 2,229 samples, 2.2 passes",
    ]


def test_shares_that_would_make_an_absurd_epoch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dataset_weights: .*5e\+11 samples; give shares"):
        mix(["a", "b"], [5, 500], (1, 1e-9))


def sequences_of(*lengths: int) -> Sequences:
    rows = [{"input_ids": [length] * length, "labels": [length] * length} for length in lengths]
    return build_sequences(rows, name="test", context_length=8)


def test_joined_datasets_keep_their_sequences_and_know_their_rows() -> None:
    first, second = sequences_of(3, 0, 4), sequences_of(9, 2)
    joined = join_sequences([first, second])
    assert [ids.tolist() for ids, _, _ in joined] == [[3] * 3, [4] * 4, [9] * 8, [2] * 2]
    assert [labels.tolist()[1:] for _, labels, _ in joined] == [[3] * 2, [4] * 3, [9] * 7, [2]]
    assert (joined.num_truncated, joined.num_empty) == (1, 1)
    said = [describe_row(int(number), ["a", "b"]) for number in joined.source_rows]
    assert said == ["a 1", "a 3", "b 1", "b 2"]
    assert join_sequences([first]) is first
    assert describe_row(int(first.source_rows[1]), ["a"]) == "3"


@given(source=st.integers(0, 20), row=st.integers(0, 2**47))
def test_a_global_row_is_one_number_for_dataset_and_row(source: int, row: int) -> None:
    number = global_row(source, row)
    assert np.int64(number) == number
    assert source_of(number) == source
    assert describe_row(number, [str(index) for index in range(21)]) == f"{source} {row + 1}"


def drawn(sizes: list[int], weights: list[float], seed: int) -> list[tuple[int, int]]:
    def source(index: int, size: int) -> Any:
        def items(num_starts: int) -> Iterator[tuple[int, int]]:
            return ((index, item) for item in range(size))

        return items

    return list(Interleaved([source(*pair) for pair in enumerate(sizes)], weights, np.random.default_rng(seed)))


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_a_stream_without_weights_gives_every_item_once_and_in_order(sizes: list[int], seed: int) -> None:
    found = drawn(sizes, [], seed)
    assert sorted(found) == [(source, item) for source, size in enumerate(sizes) for item in range(size)]
    for source, size in enumerate(sizes):
        assert [item for of, item in found if of == source] == list(range(size))


@given(sources=SIZES_AND_WEIGHTS, seed=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_a_stream_with_weights_starts_sources_again_until_all_have_ended(sources: list[Any], seed: int) -> None:
    sizes, weights = map(list, zip(*sources, strict=True))
    found = drawn(sizes, weights, seed)
    for source, size in enumerate(sizes):
        own = [item for of, item in found if of == source]
        assert own == [index % size for index in range(len(own))]
        assert len(own) >= size
    assert found == drawn(sizes, weights, seed)


def test_a_streams_sources_come_by_their_weights() -> None:
    found = Counter(source for source, _ in drawn([7000, 100], [0.7, 0.3], 3))
    assert found[0] / sum(found.values()) == pytest.approx(0.7, abs=0.02)
