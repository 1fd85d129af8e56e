"""Rows of JSON, CSV and TSV files: nothing is guessed, lost or made up; what cannot be read is named by its line."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules.text.text import Text
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from configs.datasets import DataSource
from configs.flags import parse_flags
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.files import byte_chunks, json_files, json_of_one_value
from data.files.byte_chunks import opened
from data.files.csv_files import csv_rows
from data.files.kinds import TABLES
from data.files.row_stream import RowStream
from data.sequences.causal import build_sequences
from data.splits.files import files_of_folder
from data.splits.reading import load_split
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError

AlpacaDataset = DATASETS["alpaca_dataset"]
ChatDataset = DATASETS["chat_dataset"]
TextDataset = DATASETS["text_dataset"]
LONG = "word " * 2000
EITHER = pytest.mark.parametrize("streaming", [False, True])


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def source(file: Path | str, **settings: Any) -> AlpacaDataset:
    return AlpacaDataset(str(file), validation_fraction=0.0, **settings)


def rows(config: DataSource, *, other: tuple[str, ...] = (), split: str = "train") -> list[dict[str, Any]]:
    return list(load_split("alpaca_dataset", config, split, text_columns=("output",), other_columns=other))


class Counted:
    """A file's decompressed bytes. `read` gets the number that was read so far of each such file."""

    def __init__(self, file: Path, read: list[int]) -> None:
        self.stream, self.read_so_far, self.place = opened(file), read, len(read)
        read.append(0)

    def read(self, size: int) -> bytes:
        self.read_so_far[self.place] += size
        return self.stream.read(size)

    def close(self) -> None:
        self.stream.close()


def json_lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@EITHER
@pytest.mark.parametrize("nested", [False, True])
def test_a_key_that_comes_late_is_read(streaming: bool, nested: bool, tmp_path: Path) -> None:
    """Arrow's reader takes the columns of the first 10 MB for those of the file."""
    early, late = ({"tools": {"a": 1}}, {"tools": {"a": 1, "b": None}}) if nested else ({}, {"tools": ["b"]})
    file = tmp_path / "rows.jsonl"
    file.write_text(json_lines(*[{"output": LONG} | early] * 1200, {"output": "last"} | late))
    *_, last = rows(source(file, streaming=streaming), other=("tools",))
    assert last == {"output": "last"} | late


def test_each_dict_keeps_its_own_keys_and_nulls(tmp_path: Path) -> None:
    calls = [{"name": "a", "arguments": {"x": None}}, {"name": "b", "arguments": {"y": 1.10, "z": [1, "2"]}}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json_lines(*({"output": "o", "calls": call} for call in calls)))
    assert [row["calls"] for row in rows(source(file), other=("calls",))] == calls


@EITHER
@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_cells_of_a_table_are_text_as_they_are_written(ending: str, streaming: bool, tmp_path: Path) -> None:
    cells = ["NA", "None", "null", "nan", "7", "007", "1.10", "1e5", "true", "2024-01-02", " a ", "ä\U0001f600", "a\nb"]
    file = tmp_path / f"table{ending}"
    lines = [f'{number}{"," if ending == ".csv" else chr(9)}"{cell}"' for number, cell in enumerate(cells)]
    file.write_bytes(
        b"\xef\xbb\xbf" + "\n".join([lines[0].replace("0", "id", 1).replace('"NA"', "output"), *lines]).encode()
    )
    assert [row["output"] for row in rows(source(file, streaming=streaming))] == cells


@EITHER
def test_a_table_may_have_semicolons_or_tabs_between_its_cells(streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text('id;"output, as given"\n1;"a;b"\n2;1,5\n')
    cells = [row["output, as given"] for row in csv_values(file)]
    assert cells == ["a;b", "1,5"]
    file.write_text("output;id\n1,5;1\n")
    assert [row["output"] for row in rows(source(file, streaming=streaming))] == ["1,5"]
    file.write_text("output\tid; as given\n1,5; a\t1\n")
    assert [row["output"] for row in csv_values(file)] == ["1,5; a"]


def csv_values(file: Path) -> list[dict[str, str]]:
    return [row.value for row in csv_rows(file) if row.value is not None]


def test_an_empty_cell_is_no_text(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "table.csv"
    file.write_text("instruction,output\na,b\nc,\n")
    with pytest.raises(ConfigError, match=r"table.csv, row 2: column output is empty; mend it"):
        tokenized(source(file), tokenizer)


@pytest.mark.parametrize(
    ("number", "row", "behind"),
    [
        (1000, 'q,"Yes, said he.', ", so 999 lines after it cannot be read"),
        (1000, '"Hello, she said,a', ", so 999 lines after it cannot be read"),
        (1999, 'q,"last', ""),
    ],
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_quote_that_is_not_closed_hides_no_rows(number: int, row: str, behind: str, end: str, tmp_path: Path) -> None:
    lines = [f"Question {number}?,Answer {number}." for number in range(2000)]
    lines[number] = row
    file = tmp_path / "table.csv"
    file.write_text("\n".join(["instruction,output", *lines]) + end)
    *good, bad = csv_rows(file)
    assert [row.value["output"] for row in good if row.value] == [f"Answer {place}." for place in range(number)]
    assert bad.problem == f"{file}, line {number + 2}: a quote is not closed{behind}"


@pytest.mark.parametrize(
    ("name", "text"), [("lines.jsonl", "\n \n\n"), ("list.json", "[]"), ("table.csv", "instruction,output\n\n")]
)
@EITHER
def test_a_file_without_rows_is_refused(name: str, text: str, streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^--alpaca_dataset.data_path: {file} holds no rows$"):
        rows(source(file, streaming=streaming))


@pytest.mark.parametrize("ending", [".jsonl.gz", ".json.gz", ".jsonl.zst", ".arrow", ".parquet"])
@EITHER
def test_compressed_files_and_arrow_files_are_read(ending: str, streaming: bool, tmp_path: Path) -> None:
    values = [{"output": f"{number}" * 10} for number in range(5)]
    file = tmp_path / f"rows.v2{ending}"
    text = (json.dumps(values) if ".json." in ending else json_lines(*values)).encode()
    if ending.endswith(".gz"):
        file.write_bytes(gzip.compress(text[:20]) + gzip.compress(text[20:]))
    elif ending.endswith(".zst"):
        file.write_bytes(pa.compress(text, codec="zstd", asbytes=True))
    elif ending == ".arrow":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, pa.table({"output": [""]}).schema) as writer:
            writer.write_table(pa.Table.from_pylist(values))
    else:
        datasets.Dataset.from_list(values).to_parquet(file)
    assert rows(source(file, streaming=streaming)) == values


@EITHER
@pytest.mark.parametrize(
    ("value", "train", "validation"),
    [
        ({"data": [{"output": "a"}, {"output": "b"}]}, "ab", None),
        ({"version": "2", "data": [{"output": "a"}]}, "a", None),
        ({"train": [{"output": "a"}]}, "a", None),
        ({"train": [{"output": "a"}], "test": [{"output": "c"}], "val": [{"output": "b"}]}, "a", "b"),
        ({"output": "a", "turns": [{"x": 1}]}, "a", None),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_lists_of_rows_in_an_object(
    value: dict[str, Any], train: str, validation: str | None, indent: int | None, streaming: bool, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(value, indent=indent))
    config = source(file, streaming=streaming)
    assert "".join(row["output"] for row in rows(config)) == train
    if validation:
        assert "".join(row["output"] for row in rows(config, split="validation")) == validation
    else:
        with pytest.raises(ConfigError, match="no validation split"):
            rows(config, split="validation")


@EITHER
@pytest.mark.parametrize("between", ["", "\n", " \n\n\ufeff"])
def test_lists_that_follow_each_other_are_read(between: str, streaming: bool, tmp_path: Path) -> None:
    """As `cat` puts files together; the second was dropped."""
    file = tmp_path / "rows.json"
    lists = [[{"output": "a"}, {"output": "]"}], [], [{"output": "c"}]]
    file.write_text(between.join(json.dumps(rows, indent=1) for rows in lists) + "\n")
    assert [row["output"] for row in rows(source(file, streaming=streaming))] == ["a", "]", "c"]


@EITHER
@pytest.mark.parametrize("rest", ['{"output": "b"}', "null", "]"])
def test_what_else_follows_a_list_is_refused_by_its_line(rest: str, streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(f'[\n{{"output": "a"}}\n]\n{rest}\n')
    with pytest.raises(ConfigError, match=rf"{file}, line 4: text after the end of the list"):
        list(rows(source(file, streaming=streaming)))


@EITHER
@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz", "train.json"])
@pytest.mark.parametrize(
    ("keys", "unread"),
    [
        (("data", "more"), "more is not read"),
        (("train", "training", "data", "validation", "info"), "training, data, info are not read"),
        (("data",), ""),
    ],
)
def test_lists_that_no_split_reads_are_named(
    keys: tuple[str, ...], unread: str, name: str, streaming: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    text = json.dumps({"version": 2} | {key: [{"output": key}] for key in keys}).encode()
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    is_folder = name == "train.json"
    found = rows(source(tmp_path if is_folder else file, streaming=streaming))
    assert [row["output"] for row in found] == [keys[0]]
    if is_folder and "validation" in keys:
        unread = "training, data, validation, info are not read"
    said = capsys.readouterr().out
    assert f"--alpaca_dataset.data_path: {file}: {unread}\n" in said if unread else "not read" not in said


@EITHER
def test_splits_of_a_compressed_file_are_those_of_the_file(streaming: bool, tmp_path: Path) -> None:
    """Its validation rows were dropped."""
    file = tmp_path / "rows.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"train": [{"output": "a"}], "dev": [{"output": "b"}]}).encode()))
    config = source(file, streaming=streaming)
    assert [row["output"] for row in rows(config)] == ["a"]
    assert [row["output"] for row in rows(config, split="validation")] == ["b"]


@EITHER
@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
def test_tables_that_were_put_together_with_cat_are_refused(ending: str, streaming: bool, tmp_path: Path) -> None:
    """One of the two was read, and the other dropped."""
    file, table = tmp_path / f"rows{ending}", pa.table({"output": ["a"]})
    if ending == ".parquet":
        pq.write_table(table, file, write_page_index=True)
    else:
        with pa.ipc.new_stream(str(file), table.schema) as writer:
            writer.write_table(table)
    assert [row["output"] for row in rows(source(file, streaming=streaming))] == ["a"]
    file.write_bytes(file.read_bytes() * 2)
    with pytest.raises(ConfigError, match=rf"{file} (goes on after|holds another file before).* as two files put tog"):
        rows(source(file, streaming=streaming))


# Rows that cannot be read


BROKEN = [
    ('{"output": "b"', r"line 3: broken JSON \(Expecting ',' delimiter, column 15\)"),
    ('["b"]', "line 3: not a JSON object but list"),
    ('{"output": "caf\\udce9"}', r"line 3, byte 33: not UTF-8 \(0xe9\); if it is Latin-1, .*iconv"),
    ('{"output": "\\ud83d"}', "line 3: holds half of a character"),
    ('{"output": ' + "[" * 70 + "]" * 70 + "}", "line 3: JSON that is nested 71 deep"),
]


@EITHER
@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_broken_line_is_refused_or_left_out(line: str, reason: str, streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    line = line.replace("\\udce9", "\udce9")
    text = '{"output": "a"}\n\n' + line + '\n{"output": "z"}\n'
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    config = source(file, streaming=streaming)
    with pytest.raises(ConfigError, match=rf"^--alpaca_dataset.data_path: {file}, {reason}.*--skip_bad_rows"):
        rows(config)
    assert [row["output"] for row in rows(replace(config, skip_bad_rows=True))] == ["a", "z"]


def test_left_out_lines_are_counted_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"output": "a"}\n{\n{"output": "b"}\n]\n')
    for _ in range(2):
        rows(source(file, skip_bad_rows=True))
        said = capsys.readouterr().out
        assert f"2 of 4 rows cannot be read and are left out; the first: {file}, line 2: broken JSON" in said


@pytest.mark.parametrize(
    ("text", "reason", "kept"),
    [
        (b"output,b\nx,1\ny\nz,3\n", r"line 3: 1 cells and not 2", "xz"),
        (b"output,b\nx,1\ncaf\xe9,2\nz,3\n", r"line 3, byte 17: not UTF-8 \(0xe9\)", "xz"),
        (b"output,output\nx,1\n", "names the column output twice", None),
    ],
)
def test_a_broken_row_of_a_table_is_refused_or_left_out(
    text: bytes, reason: str, kept: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"{file}.*{reason}"):
        rows(source(file))
    if kept:
        assert "".join(row["output"] for row in rows(source(file, skip_bad_rows=True))) == kept


@pytest.mark.parametrize(
    ("name", "encoding", "reason"),
    [
        ("table.csv", "utf-16", "UTF-16, not UTF-8; write it anew with `iconv"),
        ("rows.jsonl", "utf-16", "UTF-16, not UTF-8; write it anew with `iconv"),
        ("table.csv", "latin1", r"line 2, byte 21: not UTF-8 \(0xe9\)"),
    ],
)
@EITHER
def test_a_file_in_another_encoding_is_called_so_and_nothing_else_is_printed(
    name: str, encoding: str, reason: str, streaming: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_bytes('{"output": "a"}\n1,2,é\n'.encode(encoding))
    with pytest.raises(ConfigError, match=f"{file}.*{reason}"):
        rows(source(file, streaming=streaming))
    assert "Traceback" not in capfd.readouterr().err


@EITHER
def test_a_list_in_another_encoding_is_named_by_its_byte(streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text in ('[\n {"output": "caf\udce9"}\n]', '{"data": [\n {"output": "\udce9"}]}'):
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=rf"{file}, line 2, byte \d+: not UTF-8 \(0xe9\); .*iconv"):
            rows(source(file, streaming=streaming))


def test_a_text_file_in_another_encoding_is_named_by_its_byte(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(ConfigError, match=rf"{file}, line 2, byte 8: not UTF-8 \(0xe9\); .*iconv"):
        load_split("text_dataset", TextDataset(str(file)), "train", text_columns=("text",), kinds=(".txt",))


# Rows that cannot be used


def tokenized(config: DataSource, tokenizer: Any) -> Any:
    return find_dataset_function("alpaca_dataset", config)(config, tokenizer, "train")


@EITHER
def test_a_row_that_cannot_be_used_is_refused_or_left_out(
    streaming: bool, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    good = [{"instruction": f"Say {n}", "output": f"{n}"} for n in range(4)]
    file.write_text(json_lines(good[0], {"instruction": "x"}, {"instruction": "x", "output": ["y"]}, *good[1:]))
    config = source(file, streaming=streaming)
    with pytest.raises(ConfigError, match=rf"{file}, row 2: column output is empty.*--skip_bad_rows"):
        list(tokenized(config, tokenizer))
    for first in (True, False):
        found = list(tokenized(replace(config, skip_bad_rows=True), tokenizer))
        sequences = build_sequences(found, name="rows", context_length=512)
        assert sequences.source_rows.tolist() == [0, 3, 4, 5], "rows keep their numbers"
        assert "2 samples left out" in sequences.describe("train")[0]
        if first:
            assert "rows.jsonl, row 2: column output" in (said := capsys.readouterr().out)
            assert "(and 1 more of 6 rows)" in said


def test_a_conversation_that_cannot_be_used_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json_lines({"messages": turns}, {"messages": turns[:1]}, {"messages": 7}, {"messages": turns}))
    found = list(
        find_dataset_function("chat_dataset", ChatDataset())(
            ChatDataset(str(file), skip_bad_rows=True), FAMILIES["ChatML"].tokenizer(), "train"
        )
    )
    assert build_sequences(found, name="chats", context_length=512).source_rows.tolist() == [0, 3]
    assert f"left out: --chat_dataset.data_path: {file}, row 2: it has no assistant" in capsys.readouterr().out


def test_the_flag_is_one_for_all_datasets() -> None:
    config = parse_flags(["--model_name", "m", "--dataset", "samsum_dataset,f.py", "--skip_bad_rows"])
    assert all(dataset.skip_bad_rows for dataset in config.dataset_configs.values())


def test_numbers_are_text_if_text_is_meant(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json_lines({"instruction": 7, "output": 3.5}, {"instruction": "a", "output": "b"}))
    (first, _) = tokenized(source(file), tokenizer)
    assert "### Instruction:\n7\n" in tokenizer.decode(first["input_ids"])
    assert tokenizer.decode([token for token in first["labels"] if token != -100]).strip() == "3.5</s>"


def test_columns_that_no_one_reads_are_named(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json_lines({"instruction": "a", "output": "b", "id": 1}, {"instruction": "a", "output": "b", "z": 2})
    )
    tokenized(source(file), tokenizer)
    assert f"{file}: columns that are not read: id, z\n" in capsys.readouterr().out


@EITHER
@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
def test_a_mark_at_the_start_of_a_text_is_not_learned(sample_by: Any, streaming: bool, tmp_path: Path) -> None:
    """Notepad writes it, and `cat` leaves it in the middle of a file."""
    marked = "\ufeffOne.\n\n\ufeffTwo.\n"
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(marked)
    config = TextDataset(str(tmp_path), sample_by=sample_by, streaming=streaming)
    options = {"text_columns": ("text",), "kinds": (".txt",), "sample_by": sample_by}
    found = [row["text"] for row in load_split("text_dataset", config, "train", **options)]
    (tmp_path / "a.txt").write_text(marked.replace("\ufeff", ""))
    (tmp_path / "b.txt").unlink()
    plain = [row["text"] for row in load_split("text_dataset", config, "train", **options)]
    assert found == plain * 2
    assert "One." in plain[0]


@EITHER
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_mark_of_a_table_is_no_part_of_a_row(name: str, streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / name
    row = "output\na\n" if name == "rows.csv" else '{"output": "a"}\n'
    file.write_text(f"\ufeff{row}" + ("" if name == "rows.csv" else f"\ufeff{row}"))
    assert {row["output"] for row in rows(source(file, streaming=streaming))} == {"a"}


def test_a_mark_of_a_template_is_not_learned(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "chats.jsonl").write_text(json_lines({"messages": turns}))
    (tmp_path / "chat.jinja").write_text("\ufeff" + FAMILIES["ChatML"].template)
    config = ChatDataset(str(tmp_path / "chats.jsonl"), chat_template=str(tmp_path / "chat.jinja"))
    tokenizer: Any = FAMILIES["ChatML"].tokenizer()
    (row,) = find_dataset_function("chat_dataset", config)(config, tokenizer, "train")
    assert tokenizer.decode(row["input_ids"]).startswith("<|im_start|>")


CELLS = st.lists(st.sampled_from(["a", '"', ",", "\n", "é", "b c"]), max_size=5).map("".join)
WRITTEN = CELLS.map(lambda cell: '"' + cell.replace('"', '""') + '"') | st.sampled_from(['p"q', "", 'x""y', '"x" y'])


@drawn(rows=st.lists(st.tuples(WRITTEN, WRITTEN), min_size=1, max_size=20), size=st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_where_a_table_is_cut_into_chunks_changes_no_row(rows: list[tuple[str, str]], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        file = Path(folder) / "table.csv"
        file.write_text("first,second\n" + "".join(f"{first},{second}\n" for first, second in rows))
        whole = list(csv_rows(file))
        patched.setattr("data.files.byte_chunks.CHUNK_BYTES", size)
        assert list(csv_rows(file)) == whole


@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
@drawn(text=st.lists(st.sampled_from(["a", "bb", "\n", "\n\n", "\r\n", "é"]), min_size=1).map("".join))
@settings(max_examples=40, deadline=None)
def test_streamed_text_has_the_rows_that_the_library_makes(text: str, sample_by: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        file = Path(folder) / "text.txt"
        file.write_bytes(text.encode())
        library = Text(sample_by=sample_by, data_files=[str(file)], cache_dir=folder)
        expected = [
            row for _, table in library._generate_tables([str(file)], [[str(file)]]) for row in table.to_pylist()
        ]
        patched.setattr("data.files.byte_chunks.CHUNK_BYTES", 5)
        assert list(RowStream((file,), sample_by=sample_by)) == expected


@EITHER
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_line_that_does_not_end_is_not_read_to_its_end(
    ending: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file of 3 MB took 9.4 GiB of host memory."""
    monkeypatch.setattr(json_files, "_MOST_OF_LINE", 2**23)
    file = tmp_path / f"rows{ending}"
    with pa.output_stream(file, compression=None if ending == ".jsonl" else "detect") as stream:
        stream.write(b'{"output": "one"}\n{"output": "')
        for _ in range(64):
            stream.write(b"a" * 2**20)
    read = list[int]()
    monkeypatch.setattr(byte_chunks, "opened", lambda file: Counted(file, read))
    with pytest.raises(ConfigError, match=rf"rows{ending}, line 2: longer than 8.00 MiB, which is no row; split it"):
        rows(source(file, streaming=streaming))
    assert 0 < max(read) < 32 * 2**20


def test_one_compressed_value_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_of_one_value, "_MOST_OF_ONE_VALUE", 2**23)
    file = tmp_path / "rows.json.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(b'[{"output": "one"}')
        for _ in range(16):
            stream.write(b',{"output": "' + b"a" * 2**20 + b'"}')
        stream.write(b"]")
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=r"rows.json.gz: one JSON value of more than 8.00 MiB.*JSON lines"):
            rows(source(file, streaming=streaming))
    monkeypatch.undo()
    assert len(rows(source(file))) == 17


def test_a_folder_of_many_files_is_looked_through_once(tmp_path: Path) -> None:
    """10,000 files were compared with each other for a minute before the first was read."""
    for number in range(3000):
        (tmp_path / f"{number}.jsonl").write_text('{"output": "a"}\n')
    (tmp_path / "notes.md").write_text("Hi")
    config, before = source(tmp_path), time.process_time()
    files = files_of_folder("alpaca_dataset", tmp_path, config, TABLES)
    assert time.process_time() - before < 2
    assert len(files.by_split["train"]) == 3000
    assert files.note == f"{tmp_path}: no rows are read from notes.md"
