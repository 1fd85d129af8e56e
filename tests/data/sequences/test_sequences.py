"""Rows of a dataset function: checked, cut to length, counted, and refused with the row's number if wrong."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.mixing import join_sequences
from data.batches.rows import make_rows
from data.dataset_functions.user_collator import with_collator
from data.pipeline import load_sequences
from data.sequences.causal import Truncation, build_sequences
from data.sequences.tokenized import Sequences, check_token_ids
from data.streaming.sources import Stream, StreamSource
from data.streaming.steps import StreamSteps
from tests.helpers.token_documents import DOCUMENTS, row, to_rows
from utils.errors import ConfigError

BUILD = partial(build_sequences, context_length=8)


def build(*rows: Any, context_length: int = 8, truncation: Truncation = "right") -> Sequences:
    return build_sequences(rows, name="test", context_length=context_length, truncation=truncation)


def take(num_rows: int, split_slice: str | None, *, hugging_face: bool = False) -> Sequences:
    rows: Any = [row([index % 100, 1]) for index in range(num_rows)]
    rows = datasets.Dataset.from_list(rows) if hugging_face else rows
    return load_sequences(lambda *_: rows, SimpleNamespace(), None, "train", split_slice=split_slice, build=BUILD)


@given(
    documents=DOCUMENTS,
    context_length=st.integers(8, 10),
    truncation=st.sampled_from(["right", "left", "drop", "error"]),
)
@settings(max_examples=150, deadline=None)
def test_every_row_is_kept_cut_or_counted(documents: list[Any], context_length: int, truncation: Truncation) -> None:
    """Against a plain loop over lists."""
    kept, cut_tokens, truncated, too_long, empty, without_label = [], 0, 0, 0, 0, 0
    first_too_long = None
    for index, document in enumerate(documents):
        ids = [token for token, _, seen in document if seen]
        labels = [token if learned else -100 for token, learned, seen in document if seen]
        is_too_long = len(ids) > context_length
        if is_too_long and first_too_long is None:
            first_too_long = index
        part = slice(-context_length, None) if truncation == "left" else slice(context_length)
        if not ids:
            empty += 1
        elif is_too_long and truncation == "drop":
            too_long += 1
        elif all(label == -100 for label in labels[part][1:]):
            without_label += 1
        else:
            truncated += is_too_long
            cut_tokens += max(0, len(ids) - context_length)
            kept.append((index, ids[part], [-100, *labels[part][1:]]))
    rows = to_rows(documents)
    if truncation == "error" and first_too_long is not None:
        with pytest.raises(ConfigError, match=rf"row {first_too_long + 1}: \d+ tokens are more"):
            build(*rows, context_length=context_length, truncation=truncation)
        return
    if not kept:
        with pytest.raises(ConfigError, match="none of its"):
            build(*rows, context_length=context_length, truncation=truncation)
        return
    sequences = build(*rows, context_length=context_length, truncation=truncation)
    found = [(sequence.source_row, sequence.input_ids.tolist(), sequence.labels.tolist()) for sequence in sequences]
    assert found == kept
    assert len(sequences) == len(kept)
    assert sequences.lengths.tolist() == [len(ids) for _, ids, _ in kept]
    assert (sequences.num_truncated, sequences.num_tokens_cut) == (truncated, cut_tokens)
    assert (sequences.num_too_long, sequences.num_empty, sequences.num_without_label) == (
        too_long,
        empty,
        without_label,
    )


def test_lines_tell_what_was_cut_and_left_out() -> None:
    rows = [row(list(range(20))), row([5] * 9, [-100] * 8 + [5]), row([]), row([1, 2])]
    lines = "\n".join(build(*rows).describe("train"))
    assert "1 sample cut: longer than context_length (--truncation), by 12 tokens in all" in lines
    assert "1 sample left out: no label token" in lines
    assert "1 sample left out: no tokens" in lines
    assert "2 samples left out: longer" in "\n".join(build(*rows, truncation="drop").describe("train"))
    assert build(row([1, 2])).describe("train") == []


def test_shifted_labels_are_noticed() -> None:
    shifted = build(row([1, 2, 3, 4], [2, 3, 4, -100]), row([6, 7]))
    (line,) = shifted.describe("train")
    assert "warning: 2 of 3 labels are not the token at their place" in line
    assert build(row([1, 2, 3, 4], [-100, 2, 3, 4])).describe("train") == []


def test_tokens_with_a_zero_attention_mask_are_removed() -> None:
    sequences = build(row([9, 9, 4, 5, 6, 9], [9, 9, -100, 5, 6, 9], attention_mask=[0, 0, 1, 1, 1, 0]))
    ids, labels, _ = sequences[0]
    assert ids.tolist() == [4, 5, 6]
    assert labels.tolist() == [-100, 5, 6]


@pytest.mark.parametrize(
    "ids", [[1.0, 2.0], ["1", "2"], [True, False], [[1, 2], [3, 4]], [1, None], np.array([1.0, 2.0]), [1, [2, 3]]]
)
def test_ids_that_are_not_whole_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(ConfigError, match="row 2"):
        build(row([1, 2]), row(ids))


@pytest.mark.parametrize("ids", [[1, 2, 3], np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3)])
def test_ids_may_be_lists_arrays_or_tensors(ids: Any) -> None:
    assert build(row(ids))[0].input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": [1, 2, 3], "labels": [1, 2]},
        {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1]},
        {"input_ids": [1, 2]},
        {"labels": [1, 2]},
        {"text": "hello"},
        [1, 2],
    ],
)
def test_columns_that_are_missing_or_of_unequal_length_are_refused_with_the_rows_number(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="row 2"):
        build(row([1, 2]), wrong)


def test_a_dataset_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        build()


@pytest.mark.parametrize(
    ("input_ids", "labels"),
    [([3, 100], [3, 4]), ([3, 4], [3, 100]), ([3, -1], [3, 4]), ([3, 4], [3, -5]), ([3, 2**32 + 7], [3, 4])],
)
def test_a_token_outside_the_vocabulary_is_refused_with_the_rows_number(input_ids: Any, labels: Any) -> None:
    def read() -> None:
        check_token_ids(build(row([1, 2]), row([]), row(input_ids, labels)), 100, "train")

    with pytest.raises(ConfigError, match="row 3"):
        read()


def test_the_whole_vocabulary_is_allowed() -> None:
    check_token_ids(build(row([0, 99], [-100, 99])), 100, "train")


@pytest.mark.parametrize(
    ("num_rows", "split_slice", "kept"),
    [
        (14732, "1%", 147),
        (818, "1%", 8),
        (14732, "10", 10),
        (818, "10", 10),
        (5, "10", 5),
        (5, "1%", 1),
        (40, "100%", 40),
        (1000, "0.5%", 5),
        (40, None, 40),
    ],
)
def test_split_slice_keeps_a_number_of_rows_or_a_share(num_rows: int, split_slice: str, kept: int) -> None:
    sequences = take(num_rows, split_slice)
    assert len(sequences) == kept
    assert sequences.source_rows.tolist() == list(range(kept))


def test_split_slice_cuts_a_hugging_face_dataset_the_same_way() -> None:
    assert take(818, "1%", hugging_face=True).input_ids.tolist() == take(818, "1%").input_ids.tolist()


def test_a_function_with_a_parameter_split_slice_cuts_by_itself_also_under_a_collator() -> None:
    def function(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
        assert split_slice == "50%"
        return [row([5, 6]), row([7, 8])]

    as_it_is = with_collator(function, lambda tokenizer: lambda rows: {name: [rows[0][name]] for name in rows[0]})
    for cuts_itself in (function, as_it_is):
        sequences = load_sequences(cuts_itself, None, None, "train", split_slice="50%", build=BUILD)
        assert [ids.tolist() for ids, _, _ in sequences] == [[5, 6], [7, 8]], "not cut again"


def test_a_function_that_fails_or_returns_nothing_is_refused_by_name() -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("dialogue")

    def forgetful(*_: Any) -> Any:
        return None

    for function in (broken, forgetful):
        with pytest.raises(ConfigError, match=function.__name__):
            load_sequences(function, None, None, "train", split_slice=None, build=BUILD)


# Labels of another length than the inputs, as a task with an encoder has them


def build_pairs(rows: Any, *, first_row: int = 0, **_: Any) -> Sequences:
    """Sequences with as many labels as a row holds, whatever its inputs."""
    rows = list(rows)

    def offsets(name: str) -> np.ndarray:
        return np.cumsum([0, *(len(row[name]) for row in rows)])

    def flat(name: str) -> np.ndarray:
        return np.array([token for row in rows for token in row[name]], dtype=np.int32)

    numbers = np.arange(first_row, first_row + len(rows))
    return Sequences(flat("input_ids"), flat("labels"), offsets("input_ids"), offsets("labels"), numbers)


PAIRS = [
    row([5, 6, 7], [8]),
    row([9], [10, -100, 11, 12]),
    row([13, 14], []),
    row([15, 16, 17, 18], [19, 20]),
]


def as_lists(sequences: Any) -> list[tuple[list[int], list[int], int]]:
    return [(ids.tolist(), labels.tolist(), number) for ids, labels, number in sequences]


def test_labels_may_have_another_length_than_the_inputs_up_to_the_rows_of_a_batch() -> None:
    sequences = build_pairs(PAIRS)
    wanted = [(pair["input_ids"], pair["labels"], number) for number, pair in enumerate(PAIRS)]
    assert as_lists(sequences) == wanted
    assert sequences.num_label_tokens.tolist() == [1, 3, 0, 2]
    joined = join_sequences([sequences, build_pairs(PAIRS[:2])])
    assert as_lists(joined)[:4] == wanted
    assert [entry[:2] for entry in as_lists(joined)[4:]] == [entry[:2] for entry in wanted[:2]]
    for strategy in ("packing", "padding"):
        rows = make_rows(sequences, batching_strategy=strategy, context_length=5)
        assert sorted(as_lists([s for index in range(len(rows)) for s in rows[index]])) == sorted(wanted)


@pytest.mark.parametrize(
    ("index", "name", "wrong"), [(3, "labels", "row 4: label 99"), (1, "input_ids", "row 2: token id 99")]
)
def test_a_wrong_token_is_refused_by_its_own_row_if_labels_have_another_length(
    index: int, name: str, wrong: str
) -> None:
    pairs = [dict(pair) for pair in PAIRS]
    pairs[index][name] = [99, *pairs[index][name]]
    with pytest.raises(ConfigError, match=wrong):
        check_token_ids(build_pairs(pairs), 50, "train")


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding"])
def test_a_stream_carries_labels_of_another_length(packing: bool) -> None:
    source = StreamSource("a", lambda *_: PAIRS, None, None, "train", build_pairs, 50)
    stream = Stream((source,), (), seed=0, shuffle_buffer_size=3, packing=packing, context_length=5, num_steps=9)
    found: list[Any] = []
    for rows, _ in StreamSteps(stream, 1):
        found += as_lists([sequence for row in rows for sequence in row])
        if len(found) == len(PAIRS):
            break
    assert sorted(found) == sorted(as_lists(build_pairs(PAIRS)))
