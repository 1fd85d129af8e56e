"""An epoch as training sees it: every sequence once over all ranks, whole, labels unchanged, entered at any step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.layout import BatchLayout
from data.batches.padding import PaddedWidth
from data.batches.rows import make_rows
from data.batches.step_loader import StepLoader
from data.sequences.causal import build_sequences
from data.sequences.tokenized import Sequences
from tasks.causal_batches import CausalMicroBatch, Collator

PADDING = 0
STRATEGIES = st.sampled_from(["packing", "padding"])
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=40)
LAYOUTS = st.builds(BatchLayout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
Shown = tuple[tuple[int, ...], tuple[int, ...]]  # input_ids, labels


def make_sequences(masks: list[list[bool]], context_length: int) -> Sequences:
    """A sequence for each loss mask, and one with a label. No token id occurs twice, so each tells its origin."""
    rows, token = [], PADDING + 1
    for mask in [*masks, [False, True]]:
        ids = list(range(token, token + len(mask)))
        rows.append(
            {
                "input_ids": ids,
                "labels": [t if has_loss else -100 for t, has_loss in zip(ids, mask, strict=True)],
            }
        )
        token += len(mask)
    return build_sequences(rows, name="test", context_length=context_length)


def make_loader(
    sequences: Sequences,
    strategy: str,
    context_length: int,
    layout: BatchLayout,
    rank: int,
    seed: int | None,
    workers: int,
) -> StepLoader:
    return StepLoader(
        make_rows(sequences, batching_strategy=strategy, context_length=context_length),
        layout,
        rank=rank,
        seed=seed,
        collate=Collator(packing=strategy == "packing", padding_id=PADDING, width=PaddedWidth(8, context_length)),
        num_workers=workers,
    )


def sequences_of(batch: CausalMicroBatch) -> list[Shown]:
    """The sequences that the model gets, by position ids under packing and by the attention mask under padding."""
    found = []
    for row in range(len(batch.input_ids)):
        places = torch.arange(batch.input_ids.shape[1]) if batch.position_ids is None else batch.position_ids[row]
        assert (batch.attention_mask is None) == (batch.position_ids is not None)
        starts = (places == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True):
            part = slice(start, end)
            assert places[part].tolist() == list(range(end - start))
            ids, labels = batch.input_ids[row, part], batch.labels[row, part]
            is_token = ids != PADDING
            if batch.attention_mask is not None and batch.num_tokens:
                assert torch.equal(is_token.long(), batch.attention_mask[row, part])
            assert (labels[~is_token] == -100).all()
            if is_token.any():
                found.append((tuple(ids[is_token].tolist()), tuple(labels[is_token].tolist())))
    assert batch.num_tokens == sum(len(ids) for ids, _ in found)
    assert batch.num_label_tokens == sum(label != -100 for _, labels in found for label in labels)
    return found


def steps_of(loaders: list[StepLoader], epoch: int) -> list[list[Shown]]:
    """Per optimizer step, the sequences of all ranks, sorted."""
    steps = zip(*(loader.epoch(epoch) for loader in loaders), strict=True)
    return [sorted(d for share in step for batch in share for d in sequences_of(batch)) for step in steps]


@given(masks=MASKS, context_length=st.integers(8, 24), strategy=STRATEGIES, layout=LAYOUTS, seed=st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_every_kept_sequence_comes_once_per_epoch_whole_and_with_its_labels(
    masks: list[list[bool]], context_length: int, strategy: str, layout: BatchLayout, seed: int
) -> None:
    sequences = make_sequences(masks, context_length)
    kept = sorted((tuple(ids.tolist()), tuple(labels.tolist())) for ids, labels, _ in sequences)
    loaders = [
        make_loader(sequences, strategy, context_length, layout, rank, seed, 0)
        for rank in range(layout.data_parallel_size)
    ]
    for epoch in (0, 1):
        steps = steps_of(loaders, epoch)
        assert sorted(sequence for step in steps for sequence in step) == kept
        assert len(steps) == len(loaders[0])


@given(
    masks=MASKS,
    context_length=st.integers(8, 24),
    strategy=STRATEGIES,
    seed=st.one_of(st.none(), st.integers(0, 9)),
    epoch=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_steps_sequences_are_the_same_for_any_cut_of_the_global_batch(
    masks: list[list[bool]], context_length: int, strategy: str, seed: int | None, epoch: int, data: st.DataObject
) -> None:
    sequences = make_sequences(masks, context_length)
    global_batch = data.draw(st.sampled_from([4, 6, 12]))
    cuts = [
        BatchLayout(micro, global_batch // (micro * ranks), ranks)
        for ranks in (1, 2, 3, 4)
        for micro in (1, 2, 3, 4)
        if global_batch % (micro * ranks) == 0
    ]
    found = []
    for layout in (BatchLayout(global_batch, 1, 1), data.draw(st.sampled_from(cuts))):
        random.seed(len(found))  # other draws of random numbers must not matter
        np.random.seed(len(found))
        torch.manual_seed(len(found))
        loaders = [
            make_loader(sequences, strategy, context_length, layout, rank, seed, 0)
            for rank in range(layout.data_parallel_size)
        ]
        found.append(steps_of(loaders, epoch))
    assert found[0] == found[1]


def as_lists(steps: Any) -> list[Any]:
    """Everything in the micro-batches of some steps, comparable."""
    return [
        [{n: v.tolist() if torch.is_tensor(v) else v for n, v in vars(batch).items()} for batch in step]
        for step in steps
    ]


def assert_epoch_can_be_entered(data: st.DataObject, num_workers: int) -> None:
    strategy, seed = data.draw(STRATEGIES), data.draw(st.one_of(st.none(), st.integers(0, 9)))
    sequences, layout = make_sequences(data.draw(MASKS), 16), data.draw(LAYOUTS)
    rank = data.draw(st.integers(0, layout.data_parallel_size - 1))
    loader = make_loader(sequences, strategy, 16, layout, rank, seed, num_workers)
    plain = make_loader(sequences, strategy, 16, layout, rank, seed, 0)
    for epoch in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        whole = as_lists(plain.epoch(epoch))
        first_step = data.draw(st.integers(0, len(whole)))
        entered = as_lists(loader.epoch(epoch, first_step))
        assert entered == whole[first_step:]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_an_epoch_entered_at_a_step_gives_what_a_whole_one_gives_from_there(data: st.DataObject) -> None:
    assert_epoch_can_be_entered(data, num_workers=0)


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_an_epoch_can_be_entered_with_worker_processes(data: st.DataObject) -> None:
    assert_epoch_can_be_entered(data, num_workers=2)


@pytest.mark.parametrize("strategy", ["packing", "padding"])
def test_a_batch_is_as_wide_as_its_longest_row_rounded_up(strategy: str) -> None:
    sequences = make_sequences([[True] * length for length in (3, 13, 20)], 20)
    loader = make_loader(sequences, strategy, 20, BatchLayout(1, 1, 1), 0, None, 0)
    widths = [batch.input_ids.shape[1] for step in loader.epoch(0) for batch in step]
    assert widths == ([20, 20] if strategy == "packing" else [20, 16, 8, 8])


def test_a_worker_hands_over_tensors_that_can_be_written() -> None:
    loader = make_loader(make_sequences([[True] * 9], 16), "padding", 16, BatchLayout(2, 1, 1), 0, None, 1)
    ((batch,),) = loader.epoch(0)
    batch.input_ids[0, 0] = 7
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
