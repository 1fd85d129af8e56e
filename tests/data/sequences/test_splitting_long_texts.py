"""Texts longer than a row become several samples: nothing is lost, each label counts once, read whole and streamed."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from configs.flags import parse_flags
from data.pipeline import RunData, load_data
from data.sequences.causal import build_sequences
from data.sequences.tokenized import Sequences, TokenSequence
from tests.helpers.token_documents import DOCUMENTS, row, to_rows
from utils.errors import ConfigError

CONTEXT = 16


def parts_of(sequences: Sequences, number: int) -> list[TokenSequence]:
    return [sequence for sequence in sequences if sequence.source_row == number]


@given(documents=DOCUMENTS, context_length=st.integers(2, 10))
@settings(max_examples=150, deadline=None)
def test_the_parts_of_a_text_are_the_text_and_each_label_counts_once(documents: list[Any], context_length: int) -> None:
    kept, num_without_label, num_parts_without_label = {}, 0, 0
    num_split = num_parts = 0
    for number, document in enumerate(documents):
        ids = [token for token, _, seen in document if seen]
        labels = [token if learned else -100 for token, learned, seen in document if seen]
        # Token i of the text is predicted in one part, and that part has all the tokens since its own start.
        windows = [(first, first + context_length) for first in range(0, max(1, len(ids) - 1), context_length - 1)]
        parts = [(ids[first:last], [-100, *labels[first + 1 : last]]) for first, last in windows if ids]
        learned = [part for part in parts if set(part[1]) != {-100}]
        num_split += len(parts) > 1
        num_parts += len(parts) if len(parts) > 1 else 0
        num_without_label += bool(parts and not learned)
        num_parts_without_label += len(parts) - len(learned) if learned else 0
        if learned:
            kept[number] = learned
            assert list(chain.from_iterable(part_labels[1:] for _, part_labels in parts)) == labels[1:]
    rows = to_rows(documents)
    if not kept:
        with pytest.raises(ConfigError, match="none of its"):
            build_sequences(rows, name="test", context_length=context_length, truncation="split")
        return
    sequences = build_sequences(rows, name="test", context_length=context_length, truncation="split")
    found: dict[int, list[Any]] = {}
    for sequence in sequences:
        found.setdefault(sequence.source_row, []).append((sequence.input_ids.tolist(), sequence.labels.tolist()))
    assert found == kept
    assert (sequences.num_split, sequences.num_parts) == (num_split, num_parts)
    assert sequences.num_without_label == num_without_label
    assert sequences.num_parts_without_label == num_parts_without_label
    assert (sequences.num_truncated, sequences.num_tokens_cut, sequences.num_too_long) == (0, 0, 0)


def test_a_line_tells_how_many_were_split() -> None:
    rows = [row(list(range(20))), row([5] * 9, [-100] * 8 + [5]), row([1, 2])]
    sequences = build_sequences(rows, name="test", context_length=8, truncation="split")
    assert sequences.describe("train") == [
        "train: 2 samples split into 5: longer than context_length (--truncation split)",
        "train: 1 part of split samples left out: no label token",
    ]


def load(model: Path, file: Path, *flags: str, dataset: str = "text_dataset") -> RunData:
    argv = ["--model_name", str(model), "--dataset", dataset, f"--{dataset}.data_path", str(file)]
    config = parse_flags([*argv, "--run_validation", "False", *flags])
    return load_data(
        config.train_config,
        config.dataset_configs,
        AutoTokenizer.from_pretrained(model),
        build_sequences=build_sequences,
        vocab_size=600,
        context_length=CONTEXT,
    )


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts; the second is many rows long."""
    file = tmp_path_factory.mktemp("texts") / "book.txt"
    file.write_text("Anna says hi.\n\n" + "The lake is calm, and the boats are out. " * 40 + "\n\nThe end.\n")
    return file


def test_long_texts_are_split_unless_asked_otherwise(tiny_model: Path, book: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    data = load(tiny_model, book)
    parts = parts_of(data.train, 1)
    assert len(parts) > 10
    whole = [*parts[0].input_ids, *chain.from_iterable(part.input_ids[1:] for part in parts[1:])]
    assert tokenizer.decode(whole[1:-1]).split() == book.read_text().split("\n\n")[1].split()
    # One start token, one end token, none inside; the last part is learned up to the end token.
    assert [whole.count(tokenizer.bos_token_id), whole.count(tokenizer.eos_token_id)] == [1, 1]
    assert parts[-1].labels[-1] == tokenizer.eos_token_id
    assert any("split into" in note and "--truncation split" in note for note in data.notes)
    cut = load(tiny_model, book, "--truncation", "right")
    assert len(parts_of(cut.train, 1)) == 1
    assert cut.train.num_tokens_cut > 10 * CONTEXT


def test_a_stream_splits_as_reading_whole_does(tiny_model: Path, book: Path) -> None:
    whole = load(tiny_model, book).train
    stream = load(tiny_model, book, "--streaming", "--max_train_step", "3").stream
    assert stream is not None
    (streamed,) = stream.sources[0].blocks(0)
    for field in dataclasses.fields(Sequences):
        one, other = getattr(streamed, field.name), getattr(whole, field.name)
        assert np.array_equal(one, other), field.name


def test_other_datasets_are_cut_unless_splitting_is_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Say much.", "completion": "' + "word " * 60 + '"}\n')
    cut = load(tiny_model, file, dataset="instruction_dataset").train
    assert (len(cut), cut.num_truncated) == (1, 1)
    split = load(tiny_model, file, "--truncation", "split", dataset="instruction_dataset").train
    assert len(split) > 3
    assert split.num_label_tokens.sum() > 60


def test_samples_of_one_row_that_are_cut_are_no_parts_of_a_split_one() -> None:
    """A conversation may give several samples; here the second has no label within the context length."""
    ids = list(range(20))
    labels = [-100, 1, 2, 3, *[-100] * 15, 19]
    rows = [row(ids, labels, sample_lengths=[4, 16])]
    cut = build_sequences(rows, name="test", context_length=8)
    assert (len(cut), cut.num_without_label, cut.num_parts_without_label) == (1, 1, 0)
    split = build_sequences(rows, name="test", context_length=8, truncation="split")
    assert (len(split), split.num_split, split.num_parts, split.num_parts_without_label) == (2, 1, 3, 2)
