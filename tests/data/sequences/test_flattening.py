"""A Hugging Face dataset is read column by column, with the same result as row by row."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Features, LargeList, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sequences.causal import Truncation, build_sequences
from data.sequences.flattening import flatten, flatten_columns
from data.sequences.tokenized import Sequences
from tests.helpers.token_documents import DOCUMENTS, row, to_rows
from utils.errors import ConfigError


def outcome(rows: Any, truncation: Truncation) -> Any:
    """Every field of the sequences, or the message of the refusal."""
    try:
        sequences = build_sequences(rows, name="test", context_length=9, truncation=truncation)
    except ConfigError as error:
        return str(error)
    fields = vars(sequences)
    assert {name: value.dtype.name for name, value in fields.items() if isinstance(value, np.ndarray)} == {
        "input_ids": "int32",
        "labels": "int32",
        "offsets": "int64",
        "label_offsets": "int64",
        "source_rows": "int64",
    }
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


@given(
    documents=DOCUMENTS,
    kind=st.sampled_from(["int8", "int32", "uint16", "int64"]),
    make_list=st.sampled_from([List, LargeList]),
    masked=st.booleans(),
    truncation=st.sampled_from(["right", "left", "drop", "error", "split"]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_columns_and_rows_give_the_same_sequences(
    documents: list[Any], kind: str, make_list: Any, masked: bool, truncation: Truncation, data: st.DataObject
) -> None:
    rows = to_rows(documents)
    if not masked:
        rows = [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    of = {"input_ids": kind, "labels": "int64", "attention_mask": "int8"}
    features = Features({name: make_list(Value(of[name])) for name in rows[0]})
    dataset = datasets.Dataset.from_list(rows, features=features)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=20))
    if data.draw(st.booleans()):
        dataset, rows = dataset.select(chosen), [rows[index] for index in chosen]
    dataset = dataset.with_format(data.draw(st.sampled_from([None, "numpy", "torch"])))
    assert flatten_columns(dataset) is not None
    assert outcome(dataset, truncation) == outcome(rows, truncation)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": [1, None], "labels": [1, 2]},
        {"input_ids": None, "labels": [1]},
        {"input_ids": [1, 2, 3], "labels": [1, 2]},
        {"input_ids": [1, 2], "labels": [1, 2**40]},
    ],
)
def test_a_wrong_row_of_a_dataset_is_refused_with_its_number(wrong: Any) -> None:
    dataset = datasets.Dataset.from_list([row([1, 2]), wrong])
    with pytest.raises(ConfigError, match="row 2"):
        flatten(dataset, "test")


@pytest.mark.parametrize("ids", [[1.0, 2.0], [True, False], ["1", "2"], [[1], [2]]])
def test_columns_that_hold_no_whole_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"row 1: .*whole numbers|row 1: .*one length"):
        flatten(datasets.Dataset.from_list([row(ids)]), "test")


def test_hidden_columns_and_transforms_are_respected() -> None:
    dataset = datasets.Dataset.from_list([row([1, 2, 3], attention_mask=[1, 0, 1])])
    hidden = dataset.with_format("numpy", columns=["input_ids", "labels"])
    assert flatten(hidden, "test").input_ids.tolist() == [1, 2, 3]
    doubled = dataset.with_transform(lambda batch: {"input_ids": [[7, 8]], "labels": [[7, 8]]})
    assert flatten(doubled, "test").input_ids.tolist() == [7, 8]
    with pytest.raises(ConfigError, match="needs input_ids and labels"):
        flatten(dataset.with_format("numpy", columns=["input_ids"]), "test")


def test_a_dataset_of_many_chunks_keeps_its_rows_apart() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 5, 50_000)
    ends = np.cumsum(lengths)
    ids = np.arange(ends[-1])
    column = pa.LargeListArray.from_arrays(pa.array(np.concatenate([[0], ends])), pa.array(ids))
    table = pa.concat_tables(
        [pa.table({"input_ids": column, "labels": column}).slice(a, 10_000) for a in range(0, 50_000, 10_000)]
    )
    flat: Sequences = flatten(datasets.Dataset(table), "test")
    assert len(flat) == 50_000
    assert np.array_equal(flat.input_ids, ids)
    assert np.array_equal(flat.labels, ids)
    assert np.array_equal(flat.offsets[1:], ends)


def test_no_rows_are_no_rows() -> None:
    assert len(flatten([], "test")) == 0
    features = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    assert len(flatten(datasets.Dataset.from_dict({"input_ids": [], "labels": []}, features=features), "test")) == 0
