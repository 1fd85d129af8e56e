"""Several files of one split: what only some of them have is read or refused by file, the same whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from configs.flags import parse_flags
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import load_data
from data.sequences.causal import build_sequences
from data.splits.reading import load_split
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError

EITHER = pytest.mark.parametrize("streaming", [False, True])
TABLES = pytest.mark.parametrize("kind", ["parquet", "arrow"])
KINDS = pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "csv"])
WITH_TOOLS = f"{{{{ tools | tojson if tools }}}}{FAMILIES['ChatML'].template}"
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(folder: Path, kind: str, *shards: list[dict[str, Any]] | pa.Table) -> Path:
    """The shards `train-N.KIND`."""
    for number, rows in enumerate(shards):
        file = folder / f"train-{number}.{kind}"
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
        if kind == "parquet":
            pq.write_table(table, file)
        elif kind == "arrow":
            with pa.ipc.new_file(str(file), table.schema) as writer:
                writer.write_table(table)
        elif kind == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        else:
            lines = [",".join(table.column_names), *(",".join(map(str, row.values())) for row in table.to_pylist())]
            file.write_text("\n".join(lines) + "\n")
    return folder


def read(
    folder: Path, *text: str, other: tuple[str, ...] = (), dataset: str = "samsum_dataset", **settings: Any
) -> Iterator[dict[str, Any]]:
    config = DATASETS[dataset](str(folder), **settings)
    return iter(load_split(dataset, config, "train", text_columns=text, other_columns=other))


def texts(name: str, folder: Path, tokenizer: Any, **settings: Any) -> list[str]:
    config = DATASETS[name](str(folder), **settings)
    rows = find_dataset_function(name, config)(config, tokenizer, "train")
    return [tokenizer.decode(row["input_ids"]) for row in rows]


@EITHER
@TABLES
def test_a_label_that_only_a_later_file_has_is_seen(kind: str, streaming: bool, tmp_path: Path) -> None:
    """The answers that it calls bad were trained on."""
    write(tmp_path, kind, [{"messages": TURNS}], [{"messages": TURNS, "label": False}])
    with pytest.raises(ConfigError, match="preference data"):
        texts("chat_dataset", tmp_path, FAMILIES["ChatML"].tokenizer(), streaming=streaming)


@EITHER
@KINDS
@pytest.mark.parametrize("name", ["alpaca_dataset", "instruction_dataset"])
def test_text_that_only_a_later_file_has_is_learned(
    name: str, kind: str, streaming: bool, tmp_path: Path, tokenizer: Any
) -> None:
    first = {"instruction": "Say a.", "output": "a"}
    write(tmp_path, kind, [first], [first | {"input": "Loud.", "system": "Be brief."}], [first])
    settings = {"validation_fraction": 0.0} if name == "alpaca_dataset" else {}
    _, second, third = texts(name, tmp_path, tokenizer, streaming=streaming, **settings)
    assert "Be brief." in second
    assert "### Input:\nLoud." in second
    assert "### Input" not in third


@EITHER
@TABLES
@pytest.mark.parametrize("column", ["tools", "system"])
def test_what_a_chat_has_in_a_later_file_alone_is_written(
    column: str, kind: str, streaming: bool, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    value = json.dumps(tools) if column == "tools" else "Be brief."
    write(tmp_path, kind, [{"messages": TURNS}], [{"messages": TURNS, column: value}])
    _, second = texts("chat_dataset", tmp_path, FAMILIES["ChatML"].tokenizer(WITH_TOOLS), streaming=streaming)
    assert ("look_up" if column == "tools" else "Be brief.") in second


@EITHER
@TABLES
def test_an_integer_and_a_text_are_not_cast_but_refused_by_file(kind: str, streaming: bool, tmp_path: Path) -> None:
    """007 was learned as 7."""
    write(tmp_path, kind, [{"a": 7, "b": 1}], [{"a": "007", "b": 2}])
    one, other = (tmp_path / f"train-{number}.{kind}" for number in range(2))
    with pytest.raises(ConfigError, match=rf"column a is int64 in {one} and string in {other}; give it one type"):
        read(tmp_path, "a", streaming=streaming)
    assert [row["b"] for row in read(tmp_path, "b", streaming=streaming)] == [1, 2], "a column that no one reads"


@EITHER
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_numbers_and_texts_of_rows_stay_as_they_are_written(kind: str, streaming: bool, tmp_path: Path) -> None:
    write(tmp_path, kind, [{"a": 7}], [{"a": "007"}])
    assert [str(row["a"]) for row in read(tmp_path, "a", streaming=streaming)] == ["7", "007"]


@EITHER
@TABLES
@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"m": [{"x": 1}]}, {"m": [{"x": "1"}]}, r"column m\[\].x is int64 in .*train-0.* and string in .*train-1"),
        ({"m": {"x": 1}}, {"m": [{"x": 1}]}, "column m is struct in .*train-0.* and list in .*train-1"),
        ({"m": 1}, {"m": 1.5}, "column m is int64 in .*train-0.* and double|float64 in .*train-1"),
        ({"m": True}, {"m": 1}, "column m is bool in .*train-0.* and int64 in .*train-1"),
    ],
)
def test_types_that_cannot_be_joined_are_named(
    first: dict[str, Any], second: dict[str, Any], reason: str, kind: str, streaming: bool, tmp_path: Path
) -> None:
    write(tmp_path, kind, [first], [second])
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, other=("m",), streaming=streaming)


@EITHER
@TABLES
def test_nulls_come_first_and_types_grow(kind: str, streaming: bool, tmp_path: Path) -> None:
    """A column of nulls in the first file ended a streamed run in its middle."""
    wide = pa.schema(
        [
            ("a", pa.large_string()),
            ("n", pa.int8()),
            ("m", pa.struct([("x", pa.int16()), ("y", pa.list_(pa.string()))])),
        ]
    )
    write(
        tmp_path,
        kind,
        [{"a": None, "n": 1, "m": {"x": None, "y": []}}],
        pa.Table.from_pylist([{"a": "b", "n": 2, "m": {"x": 5, "y": ["z"]}}], schema=wide),
        [{"m": {"z": "new"}, "a": "c", "n": 2**40}],
    )
    found = list(read(tmp_path, "a", other=("n", "m"), streaming=streaming, skip_bad_rows=True))
    assert [row["a"] for row in found] == [None, "b", "c"]
    assert [row["n"] for row in found] == [1, 2, 2**40]
    assert [row["m"]["y"] for row in found] == [[], ["z"], None]
    assert [row["m"]["z"] for row in found] == [None, None, "new"]


@EITHER
@KINDS
def test_a_file_without_a_column_that_must_be_there_is_refused_by_name(
    kind: str, streaming: bool, tmp_path: Path, tokenizer: Any
) -> None:
    """Before training: a stream ended when it came to the file."""
    write(tmp_path, kind, [{"dialogue": "a", "summary": "b"}] * 2, [{"dialogue": "a", "highlights": "b"}])
    with pytest.raises(ConfigError, match=rf"{tmp_path}/train-1.{kind} has nothing in column summary|row 3: column su"):
        texts("samsum_dataset", tmp_path, tokenizer, streaming=streaming)
    assert "Summary" in texts("samsum_dataset", tmp_path, tokenizer, streaming=streaming, skip_bad_rows=True)[0]


@EITHER
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_turns_under_two_names_in_two_files_are_refused(kind: str, streaming: bool, tmp_path: Path) -> None:
    write(tmp_path, kind, [{"messages": TURNS}], [{"conversations": TURNS}])
    with pytest.raises(ConfigError, match="has turns in messages and conversations; name one"):
        texts("chat_dataset", tmp_path, FAMILIES["ChatML"].tokenizer(), streaming=streaming)


@EITHER
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_labels_that_only_a_later_file_has_are_not_made_up_for_the_first(
    kind: str, streaming: bool, tmp_path: Path
) -> None:
    write(tmp_path, kind, [{"input_ids": [5, 6]}], [{"input_ids": [5, 6], "labels": [-100, 6]}])
    config = DATASETS["custom_dataset"](data_path=str(tmp_path), streaming=streaming)
    with pytest.raises(ConfigError, match=rf"train-0.{kind} has nothing in column labels"):
        list(find_dataset_function("custom_dataset", config)(config, None, "train"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_that_a_later_file_begins_with_is_checked_before_a_stream_starts(
    kind: str, tiny_model: Path, tmp_path: Path, tokenizer: Any
) -> None:
    """The run ended when it came to the file."""
    row = {"instruction": "Say a.", "output": "a"}
    write(tmp_path, kind, [row] * 100, [row | {"images": ["a.png"]}])
    argv = ["--model_name", str(tiny_model), "--dataset", "alpaca_dataset", "--alpaca_dataset.data_path", str(tmp_path)]
    argv += ["--streaming", "--max_train_step", "5", "--run_validation", "False"]

    def load(*flags: str) -> Any:
        config = parse_flags([*argv, *flags])
        options = {"build_sequences": build_sequences, "vocab_size": 600, "context_length": 256}
        return load_data(config.train_config, config.dataset_configs, tokenizer, **options).stream

    with pytest.raises(ConfigError, match=rf"{tmp_path}/train-1.{kind}, row 1: column images holds what a run on text"):
        load()
    assert load("--skip_bad_rows")
    assert load("--split_slice", "90")


# Columns of types that cannot be read

MAPS = pa.table({"a": ["b"], "m": pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))})


@EITHER
@TABLES
def test_a_map_blocks_a_file_only_if_it_is_read(
    kind: str, streaming: bool, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, kind, MAPS)
    config = DATASETS["text_dataset"](str(tmp_path), text_column="a", streaming=streaming)
    assert len(list(find_dataset_function("text_dataset", config)(config, tokenizer, "train"))) == 1
    assert "columns that are not read: m" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"train-0.* has the column m as map<string, string.*; write it as JSON"):
        read(tmp_path, other=("m",), streaming=streaming)


@EITHER
@TABLES
def test_views_are_read_as_the_lists_and_texts_that_they_are(kind: str, streaming: bool, tmp_path: Path) -> None:
    """Arrow's own cast of a list view gives an array that is invalid."""
    views = pa.array([["x", "y"], None, [], ["z", None]], pa.list_view(pa.string_view()))
    columns = {
        "a": views,
        "b": pa.StructArray.from_arrays([views], ["inner"]),
        "c": pa.array(["s", "s", None, "t"]).dictionary_encode(),
        "d": pa.array([[1], None, [], [2, 3]], pa.large_list_view(pa.int64())),
    }
    table = pa.table(columns)
    write(tmp_path, kind, table.slice(0, 1), table.slice(1))
    assert list(read(tmp_path, other=tuple(columns), streaming=streaming)) == table.to_pylist()


# Files that are damaged


@EITHER
@pytest.mark.parametrize(
    ("kind", "keeps"), [("parquet", slice(0, 300)), ("arrow", slice(0, 300)), ("parquet", slice(64, None))]
)
def test_a_later_file_that_is_damaged_is_named(kind: str, keeps: slice, streaming: bool, tmp_path: Path) -> None:
    """Cut off, or overwritten at its beginning: the footer of a Parquet file is whole, and its rows are not."""
    write(tmp_path, kind, [{"a": "b"}], [{"a": "c" * 1000}])
    file = tmp_path / f"train-1.{kind}"
    file.write_bytes((b"\xff" * 64 if keeps.start else b"") + file.read_bytes()[keeps])
    with pytest.raises(ConfigError, match=rf"{file} could not be read"):
        list(read(tmp_path, "a", streaming=streaming))
