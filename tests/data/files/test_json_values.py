"""Numbers become the text that the file has, classes their names, and a key that is given twice is refused."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.files.json_values import WrittenNumber, decode_row
from tests.helpers.tokenizers_of_kinds import byte_level
from utils.errors import ConfigError

WAYS = [".jsonl", "list.json", "object.json", ".jsonl.gz"]


def write(folder: Path, way: str, rows: list[str]) -> Path:
    file = folder / f"a{way}" if way.startswith(".") else folder / way
    texts = {"list.json": "[\n%s]", "object.json": '{"version": 1, "data" : [%s ], "z": [1]}'}
    lines = "".join(f"{row}\n" for row in rows)
    text = texts[way] % ",\n".join(rows) if way in texts else lines
    file.write_bytes(gzip.compress(text.encode()) if way.endswith(".gz") else text.encode())
    return file


def texts(path: Path, name: str = "text_dataset", **settings: Any) -> list[str]:
    config = DATASETS[name](data_path=str(path), **settings)  # type: ignore[call-arg]
    rows = find_dataset_function(name, config)(config, byte_level(), "train")
    return [byte_level().decode(row["input_ids"], skip_special_tokens=True) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_number_is_the_text_that_the_file_has(way: str, streaming: bool, tmp_path: Path) -> None:
    written = ["1.10", "1e5", "1E-07", "12345678901234567890.12345678901234567890", "-0.0", "7", "12345678901234567890"]
    file = write(tmp_path, way, [f'{{"text": {number}}}' for number in written])
    assert texts(file, streaming=streaming) == written


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", ["Infinity", "-Infinity"])
def test_a_number_that_is_not_finite_is_no_text(number: str, way: str, streaming: bool, tmp_path: Path) -> None:
    file = write(tmp_path, way, ['{"text": "one"}', f'{{"text": {number}}}', '{"text": 1e999}'])
    with pytest.raises(ConfigError, match=f"row 2: column text is not text but the number {number}"):
        texts(file, streaming=streaming)
    kept = [text for text in texts(file, streaming=streaming, skip_bad_rows=True) if text]
    assert kept == ["one", "1e999"], "which the file spells"


def test_an_infinite_number_of_a_table_is_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1.5, float("-inf")]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 2: column text is not text but the number -inf"):
        texts(tmp_path / "a.parquet")
    row = {"instruction": "a", "input": float("inf"), "output": "c"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="row 1: column input is not text but the number Infinity"):
        texts(tmp_path / "a.jsonl", "alpaca_dataset", validation_fraction=0.0)


def test_a_written_number_is_a_number_still() -> None:
    row = decode_row('{"a": 1.10, "b": [1.10], "c": {"d": 1.10}, "e": "1.10"}')
    assert row == {"a": 1.1, "b": [1.1], "c": {"d": 1.1}, "e": "1.10"}
    assert [str(row["a"]), str(row["b"][0]), json.dumps(row["a"])] == ["1.10", "1.1", "1.1"]
    assert str(pickle.loads(pickle.dumps(row["a"]))) == "1.10"
    assert isinstance(row["a"], WrittenNumber)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ['{"text": "good", "text": "bad"}', '{"text": "a", "meta": {"k": 1, "k": 2}}'])
def test_a_key_that_is_given_twice_is_refused_with_its_row(row: str, way: str, streaming: bool, tmp_path: Path) -> None:
    file = write(tmp_path, way, ['{"text": "one"}', row, '{"text": "three"}'])
    with pytest.raises(ConfigError, match=r"(line 2|item 2.*): the key (text|k) is given twice") as refused:
        texts(file, streaming=streaming)
    assert file.name in str(refused.value)
    kept = [text for text in texts(file, streaming=streaming, skip_bad_rows=True) if text]
    assert kept == ["one", "three"]


@pytest.mark.parametrize("column", ["instruction", "input", "output"])
def test_a_boolean_is_no_text(column: str, tmp_path: Path) -> None:
    row = {"instruction": "a", "input": "b", "output": "c", column: True}
    file = write(tmp_path, ".jsonl", [json.dumps(row)])
    with pytest.raises(ConfigError, match=f"row 1: column {column} is not text but bool"):
        texts(file, "instruction_dataset")


def test_a_boolean_is_no_system_and_no_text_in_a_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [True]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 1: column text is not text but bool"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_a_class_is_its_name_and_a_short_number_has_its_own_digits(form: str, streaming: bool, tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "question": datasets.Value("string"),
            "input": datasets.Value("float32"),
            "answer": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    values = {"question": ["Is it?", "Was it?"], "input": [0.1, 2.5], "answer": [1, 0]}
    data = datasets.Dataset.from_dict(values, features=features)
    path = tmp_path / ("saved" if form == "saved" else "a.parquet")
    data.save_to_disk(str(path)) if form == "saved" else data.to_parquet(path)
    found = texts(path, "instruction_dataset", input_column="input", streaming=streaming)
    assert found == ["0.1\n\nQuestion: Is it?\nAnswer:\nyes", "2.5\n\nQuestion: Was it?\nAnswer:\nno"]
