"""Text and names that are not UTF-8 are refused with their file and row, or left out, in tables of every kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.flags import parse_flags
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from tests.helpers.tokenizers_of_kinds import byte_level
from utils.errors import ConfigError

EITHER = pytest.mark.parametrize("streaming", [False, True])
LATIN = [b"one", b"two", b"na\xefve", b"four"]


def texts(values: list[bytes]) -> pa.Array:
    """A column of text whatever its bytes are; Arrow's own functions would refuse these."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


COLUMNS = {
    "text": lambda: texts(LATIN),
    "large text": lambda: texts(LATIN).view(pa.binary()).cast(pa.large_binary()).view(pa.large_string()),
    "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3]), texts(LATIN)),
}


def write(place: Path, kind: str, table: pa.Table) -> Path:
    if kind == "saved":
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(place))
        return place
    file = place.with_suffix(".parquet" if kind == "parquet" else ".arrow")
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=2)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return file


def read(path: Path, name: str = "text_dataset", **settings: Any) -> list[str]:
    config = DATASETS[name](data_path=str(path), **settings)  # type: ignore[call-arg]
    rows = find_dataset_function(name, config)(config, byte_level(), "train")
    found = [byte_level().decode(row["input_ids"], skip_special_tokens=True) for row in rows]
    return [text for text in found if text]


@EITHER
@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream", "saved"])
@pytest.mark.parametrize("column", COLUMNS)
def test_text_that_is_not_utf8_is_refused_with_file_and_row(
    column: str, kind: str, streaming: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows", kind, pa.table({"text": COLUMNS[column](), "other": texts(LATIN)}))
    with pytest.raises(ConfigError) as refused:
        read(path, streaming=streaming)
    if column == "dictionary" and kind == "parquet":  # Arrow reads no row of such a row group
        assert f"{path}, rows 1 to 2: column text holds text that is not UTF-8" in str(refused.value)
        return
    assert f"{path}, row 3: column text holds text that is not UTF-8 (0xef, its byte 3)" in str(refused.value)
    assert read(path, streaming=streaming, skip_bad_rows=True) == ["one", "two", "four"]


@EITHER
def test_text_inside_of_turns_is_refused_so_too(streaming: bool, tmp_path: Path) -> None:
    roles, contents = pa.array(["user", "assistant"] * 2), texts([b"Hi", b"Hello", b"Ol\xe1", b"Yes"])
    turns = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    path = write(tmp_path / "rows", "parquet", pa.table({"messages": pa.ListArray.from_arrays([0, 2, 4], turns)}))
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"row 2: column messages holds text that is not UTF-8 \(0xe1, its byte 3\)"):
        read(path, "chat_dataset", chat_template=str(template), streaming=streaming)


@EITHER
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_is_not_read_may_hold_anything(kind: str, streaming: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "rows", kind, pa.table({"text": ["a", "b", "c", "d"], "other": texts(LATIN)}))
    assert read(path, streaming=streaming) == ["a", "b", "c", "d"]


def test_the_row_of_one_of_several_files_is_counted_in_it(tmp_path: Path) -> None:
    write(tmp_path / "a", "parquet", pa.table({"text": ["a", "b"]}))
    write(tmp_path / "b", "parquet", pa.table({"text": texts(LATIN)}))
    with pytest.raises(ConfigError, match=r"row 5 \(row 3 of .*b.parquet\): column text"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"b.parquet, row 3: column text"):
        read(tmp_path, streaming=True)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
def test_a_file_whose_name_is_not_utf8_is_refused(ending: str, tmp_path: Path) -> None:
    """Its name reached run.yaml, or the library's list of files, which ended in a traceback."""
    table, file = pa.table({"text": ["a"]}), tmp_path / f"rows.{ending}"
    contents = {"jsonl": '{"text": "a"}\n', "csv": "text\na\n", "txt": "a\n"}
    pq.write_table(table, file) if ending == "parquet" else file.write_text(contents[ending])
    named = os.path.join(os.fsencode(tmp_path), b"na\xefve." + ending.encode())
    os.rename(file, named)
    with pytest.raises(ConfigError, match=r"the name of '.*na\\udcefve.*' is not UTF-8; rename it"):
        read(tmp_path)
    flags = ["--model_name", "m", "--text_dataset.data_path", os.fsdecode(named)]
    with pytest.raises(ConfigError, match=r"--text_dataset.data_path: '.*na\\udcefve.*' is not UTF-8; rename the file"):
        parse_flags(flags)


@pytest.mark.parametrize("flag", ["--output_dir", "--chat_dataset.chat_template", "--model_name", "--config"])
def test_a_flag_that_is_not_utf8_is_refused(flag: str) -> None:
    flags = {"--model_name": "m", "--dataset": "samsum_dataset", flag: os.fsdecode(b"na\xefve")}
    with pytest.raises(ConfigError, match=rf"{flag}: 'na\\udcefve' is not UTF-8"):
        parse_flags([part for item in flags.items() for part in item])
