"""The order of an epoch, and how little padding it leaves: rows of like length share a batch, each comes once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.order import WINDOW_ROWS, epoch_order
from data.batches.padding import EXACT, PaddedWidth, one_width, padding_share

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=120)


def samsum_like(num_rows: int, seed: int) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(np.log(150), 0.8, num_rows), 4, 2048).astype(np.int64)


def order_of(lengths: np.ndarray, *, global_batch: int, seed: int | None = 1, epoch: int = 0) -> np.ndarray:
    return epoch_order(len(lengths), seed=seed, epoch=epoch, global_batch_size=global_batch, lengths=lengths)


@given(lengths=LENGTHS, global_batch=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_every_row_comes_once_and_a_batch_is_sorted_longest_first(
    lengths: list[int], global_batch: int, seed: int, epoch: int
) -> None:
    of_rows = np.array(lengths)
    order = order_of(of_rows, global_batch=global_batch, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    for start in range(0, len(order), global_batch):
        assert (np.diff(of_rows[order[start : start + global_batch]]) <= 0).all()


@given(
    lengths=st.lists(st.integers(1, 50), min_size=60, max_size=120), seed=st.integers(0, 99), epoch=st.integers(0, 9)
)
@settings(max_examples=50, deadline=None)
def test_batches_differ_from_epoch_to_epoch_and_from_seed_to_seed(lengths: list[int], seed: int, epoch: int) -> None:
    def batches(seed: int, epoch: int) -> set[frozenset[int]]:
        order = order_of(np.array(lengths), global_batch=6, seed=seed, epoch=epoch)
        return {frozenset(order[start : start + 6].tolist()) for start in range(0, len(order), 6)}

    here = batches(seed, epoch)
    assert here == batches(seed, epoch)
    assert here != batches(seed, epoch + 1)
    assert here != batches(seed + 1, epoch)


def test_short_and_long_batches_come_in_no_order() -> None:
    lengths = samsum_like(5 * WINDOW_ROWS, 0)
    means = lengths[order_of(lengths, global_batch=16)].reshape(-1, 16).mean(axis=1)
    places = np.arange(len(means))
    assert abs(np.corrcoef(places, means)[0, 1]) < 0.2


def test_evaluation_is_not_shuffled_but_sorted_where_rows_are_padded() -> None:
    assert epoch_order(4, seed=None, epoch=3, global_batch_size=2).tolist() == [0, 1, 2, 3]
    assert order_of(np.array([3, 9, 3, 5]), global_batch=2, seed=None).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("global_batch", [8, 16, 32, 64])
@pytest.mark.parametrize("micro_batch", [4, 8])
@pytest.mark.parametrize("num_rows", [5_000, 14_732])  # SAMSum's training split has 14,732
def test_less_than_a_tenth_of_the_batches_is_padding(global_batch: int, micro_batch: int, num_rows: int) -> None:
    for seed in range(3):
        lengths = samsum_like(num_rows, seed)
        order = order_of(lengths, global_batch=global_batch, seed=seed)
        assert padding_share(lengths[order], micro_batch, PaddedWidth(8, 2048)) < 0.1


@given(lengths=LENGTHS, micro_batch=st.integers(1, 9), multiple=st.integers(1, 16), limit=st.integers(50, 60))
@settings(max_examples=200, deadline=None)
def test_the_share_of_padding_is_that_of_a_plain_count(
    lengths: list[int], micro_batch: int, multiple: int, limit: int
) -> None:
    places = 0
    for start in range(0, len(lengths), micro_batch):
        part = lengths[start : start + micro_batch]
        places += len(part) * min(limit, -(-max(part) // multiple) * multiple)
    found = padding_share(np.array(lengths), micro_batch, PaddedWidth(multiple, limit))
    assert found == pytest.approx(1 - sum(lengths) / places)


@pytest.mark.parametrize(("longest", "wide"), [(1, 8), (8, 8), (9, 16), (97, 100), (100, 100)])
def test_a_batch_is_rounded_up_but_never_above_the_longest_row_there_may_be(longest: int, wide: int) -> None:
    assert PaddedWidth(8, 100).of(longest) == wide
    assert EXACT.of(longest) == longest


@pytest.mark.parametrize(("longest", "wide"), [(1, 8), (2500, 2504), (4095, 4095)])
def test_one_width_for_all_is_that_of_the_longest_row(longest: int, wide: int) -> None:
    width = one_width(PaddedWidth(8, 4095), longest)
    assert {int(width.of(length)) for length in (1, longest // 2 + 1, longest)} == {wide}
