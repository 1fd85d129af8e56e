"""Order and cutting: a step's rows depend on seed, epoch and global batch alone; cutting only divides them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.layout import BatchLayout
from data.batches.rows import Rows, make_rows
from data.batches.step_loader import StepLoader, StepSampler
from data.sequences.causal import build_sequences
from data.sequences.tokenized import Sequences

LAYOUTS = st.builds(BatchLayout, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
NUM_ROWS = st.integers(1, 70)


def steps_by_rank(num_rows: int, layout: BatchLayout, *, seed: int | None = 1, epoch: int = 0) -> list[list[Any]]:
    """[rank][step][micro-batch] -> rows."""
    ranks = []
    for rank in range(layout.data_parallel_size):
        sampler = StepSampler(num_rows, layout, rank, seed)
        sampler.epoch = epoch
        ranks.append(list(sampler.steps()))
    return ranks


def rows_of_steps(ranks: list[list[Any]]) -> list[list[int]]:
    """Per step, the rows of all ranks, sorted."""
    return [sorted(row for share in step for micro in share for row in micro) for step in zip(*ranks, strict=True)]


@given(num_rows=NUM_ROWS, layout=LAYOUTS, seed=st.one_of(st.none(), st.integers(0, 9)), epoch=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_every_row_comes_exactly_once_per_epoch(
    num_rows: int, layout: BatchLayout, seed: int | None, epoch: int
) -> None:
    steps = rows_of_steps(steps_by_rank(num_rows, layout, seed=seed, epoch=epoch))
    assert sorted(row for step in steps for row in step) == list(range(num_rows))


@given(num_rows=NUM_ROWS, layout=LAYOUTS)
@settings(max_examples=200, deadline=None)
def test_an_epoch_has_full_steps_and_perhaps_a_smaller_last_one(num_rows: int, layout: BatchLayout) -> None:
    sizes = [len(step) for step in rows_of_steps(steps_by_rank(num_rows, layout))]
    assert len(sizes) == layout.num_steps(num_rows) == int(np.ceil(num_rows / layout.global_batch_size))
    assert sizes[:-1] == [layout.global_batch_size] * (len(sizes) - 1)
    assert sizes[-1] == num_rows - sum(sizes[:-1])


@given(num_rows=NUM_ROWS, layout=LAYOUTS)
@settings(max_examples=200, deadline=None)
def test_every_rank_makes_the_same_number_of_micro_batches(num_rows: int, layout: BatchLayout) -> None:
    ranks = steps_by_rank(num_rows, layout)
    for shares in zip(*ranks, strict=True):
        assert len({len(share) for share in shares}) == 1
        assert 1 <= len(shares[0]) <= layout.gradient_accumulation_steps
        assert all(len(micro) <= layout.rows_per_micro_batch for share in shares for micro in share)
        assert all(any(share[i] for share in shares) for i in range(len(shares[0]))), "a micro-batch of no rank's rows"


@given(num_rows=NUM_ROWS, global_batch=st.sampled_from([4, 6, 12, 24]), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_step_holds_the_same_rows_for_any_cut_of_the_global_batch(
    num_rows: int, global_batch: int, data: st.DataObject
) -> None:
    cuts = [
        BatchLayout(micro, global_batch // (micro * ranks), ranks)
        for ranks in range(1, 7)
        for micro in range(1, global_batch + 1)
        if global_batch % (micro * ranks) == 0
    ]
    epoch = data.draw(st.integers(0, 3))
    first = rows_of_steps(steps_by_rank(num_rows, BatchLayout(global_batch, 1, 1), epoch=epoch))
    for layout in data.draw(st.lists(st.sampled_from(cuts), min_size=1, max_size=3)):
        assert rows_of_steps(steps_by_rank(num_rows, layout, epoch=epoch)) == first


@given(num_rows=st.integers(20, 70), seed=st.integers(0, 99), epoch=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_order_is_a_function_of_seed_and_epoch_alone(num_rows: int, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int, layout: BatchLayout, rank: int) -> list[int]:
        sampler = StepSampler(num_rows, layout, rank, seed)
        sampler.epoch = epoch
        np.random.default_rng(0).permutation(5)
        np.random.seed(rank)  # other draws of random numbers must not matter
        return sampler.order().tolist()

    here = order(seed, epoch, BatchLayout(1, 1, 1), 0)
    assert here == order(seed, epoch, BatchLayout(2, 3, 2), 1)
    assert here != order(seed, epoch + 1, BatchLayout(1, 1, 1), 0)
    assert here != order(seed + 1, epoch, BatchLayout(1, 1, 1), 0)


@given(num_rows=NUM_ROWS, layout=LAYOUTS, limit=st.integers(1, 80), epoch=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_limited_epoch_is_the_beginning_of_the_whole_one(
    num_rows: int, layout: BatchLayout, limit: int, epoch: int
) -> None:
    limited = replace(layout, max_rows_per_epoch=limit)
    whole, first = (rows_of_steps(steps_by_rank(num_rows, some, epoch=epoch)) for some in (layout, limited))
    assert sum(map(len, first)) == min(num_rows, limit)
    assert len(first) == limited.num_steps(num_rows)
    assert first[:-1] == whole[: len(first) - 1]
    assert set(first[-1]) <= set(whole[len(first) - 1])


def test_without_a_seed_rows_come_in_file_order() -> None:
    assert [step[0] for step in StepSampler(5, BatchLayout(2, 1, 1), 0, None).steps()] == [[0, 1], [2, 3], [4]]


@given(num_rows=NUM_ROWS, layout=LAYOUTS, epoch=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_packed_rows_are_shuffled_and_no_more(num_rows: int, layout: BatchLayout, epoch: int) -> None:
    rows = make_rows(make_sequences(num_rows), batching_strategy="packing", context_length=11)
    loader = StepLoader(rows, layout, rank=0, seed=5, collate=source_rows)
    loader.sampler.epoch = epoch
    shuffled = np.random.default_rng([5, epoch]).permutation(len(rows))
    assert loader.sampler.order().tolist() == shuffled.tolist()


def test_a_sequence_that_an_epoch_holds_twice_is_in_two_places() -> None:
    indices = np.array([2, 0, 2, 1, 2])
    for strategy in ("packing", "padding"):
        rows = make_rows(make_sequences(3), batching_strategy=strategy, context_length=7, indices=indices)
        assert sorted(source for i in range(len(rows)) for _, _, source in rows[i]) == [0, 1, 2, 2, 2]
        assert rows.lengths.tolist() == [sum(len(ids) for ids, _, _ in rows[i]) for i in range(len(rows))]


def make_sequences(num_rows: int) -> Sequences:
    rows = [{"input_ids": [index, 5, 6], "labels": [index, 5, 6]} for index in range(num_rows)]
    return build_sequences(rows, name="test", context_length=8)


def read_epochs(num_workers: int, *, rank: int, epochs: list[int], take: int | None = None, of: int = 1) -> list[Any]:
    """Per epoch and step, this rank's micro-batches as tuples of source rows."""
    loader = loader_of_23_rows(source_rows, num_workers=num_workers, rank=rank, num_epochs=of)
    assert len(loader) == 3
    found = []
    for epoch in epochs:
        steps = []
        for step in loader.epoch(epoch):
            steps.append(step)
            if len(steps) == take:
                break
        found.append(steps)
    return found


def loader_of_23_rows(collate: Any, **options: Any) -> StepLoader:
    rows = make_rows(make_sequences(23), batching_strategy="padding", context_length=8)
    return StepLoader(rows, BatchLayout(2, 2, 2), seed=4, collate=collate, **options)


def source_rows(rows: list[Any]) -> tuple[int, ...]:
    return tuple(int(ids[0]) for row in rows for ids, _, _ in row)


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_are_the_same_with_and_without_a_worker_process(rank: int) -> None:
    here = read_epochs(0, rank=rank, epochs=[0, 1, 0])
    assert here == read_epochs(1, rank=rank, epochs=[0, 1, 0])
    assert here[0] == here[2] != here[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_left_early_does_not_shift_the_next(num_workers: int) -> None:
    _, second = read_epochs(num_workers, rank=0, epochs=[0, 1], take=1)
    assert second == [read_epochs(0, rank=0, epochs=[1])[0][0]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("take", [None, 2])
def test_epochs_that_are_read_ahead_are_those_read_by_themselves(num_workers: int, take: int | None) -> None:
    epochs = [0, 1, 2, 0, 1, 1, 2]
    found = read_epochs(num_workers, rank=1, epochs=epochs, take=take, of=3)
    assert found == [read_epochs(0, rank=1, epochs=[epoch])[0][:take] for epoch in epochs]


def test_workers_read_the_next_epoch_ahead_and_none_after_the_last(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    loader = loader_of_23_rows(partial(noted_rows, noted), rank=0, num_workers=1, num_epochs=2)
    first = [row for step in loader.epoch(0) for micro_batch in step for row in micro_batch]
    deadline = time.monotonic() + 60
    while noted.stat().st_size == len(first):
        assert time.monotonic() < deadline, "nothing was read ahead"
        time.sleep(0.01)
    second = [row for step in loader.epoch(1) for micro_batch in step for row in micro_batch]
    time.sleep(0.2)  # for what must not be read
    assert noted.stat().st_size == len(first + second)
    assert [row for step in loader.epoch(1) for micro_batch in step for row in micro_batch] == second


def noted_rows(file: Path, rows: list[Any]) -> tuple[int, ...]:
    """The source rows. `file` gets a byte for each."""
    with file.open("a") as noted:
        noted.write("." * len(rows))
    return source_rows(rows)


def test_a_row_knows_its_sequences_and_where_they_came_from() -> None:
    rows = make_rows(make_sequences(6), batching_strategy="packing", context_length=7)
    assert all(len(rows[i]) == 2 for i in range(3))
    assert len(rows) == 3
    assert sorted(source for i in range(3) for _, _, source in rows[i]) == list(range(6))
    assert all(ids.tolist() == [source, 5, 6] for i in range(3) for ids, _, source in rows[i])


def test_the_first_rows_alone_are_the_first_rows() -> None:
    rows = make_rows(make_sequences(6), batching_strategy="padding", context_length=7)
    first: Rows = rows.first(2)
    assert len(first) == 2
    assert [source_rows([first[i]]) for i in range(2)] == [(0,), (1,)]
    assert len(rows.first(99)) == 6
