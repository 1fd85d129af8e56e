"""Splits: every format and place of examples, splits by name and by fraction, slices, and refusals."""

from __future__ import annotations

import errno
import json
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from configs.absolute_paths import make_paths_absolute
from configs.datasets import BUILT_IN_FOLDER, DataSource
from configs.flags import parse_flags
from configs.formats import DATASETS
from data.cache_folder import not_kept
from data.dataset_functions.importing import find_dataset_function, load_dataset_file
from data.pipeline import load_sequences
from data.sequences.causal import build_sequences
from data.splits.reading import load_split
from data.splits.validation_share import has_validation
from data.streaming.tokenized_stream import TokenizedStream
from data.tokens import loss_mask
from data.tokens.loss_mask import tokenize_spans
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError

AlpacaDataset = DATASETS["alpaca_dataset"]
ChatDataset = DATASETS["chat_dataset"]
GrammarDataset = DATASETS["grammar_dataset"]
InstructionDataset = DATASETS["instruction_dataset"]
SamsumDataset = DATASETS["samsum_dataset"]
TextDataset = DATASETS["text_dataset"]
ROWS = [
    {"instruction": f"Name number {i}.", "input": "" if i % 2 else f"as {i}", "output": f"It is {i}."}
    for i in range(40)
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    elif file.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(file)
    else:
        datasets.Dataset.from_list(rows).to_parquet(file)
    return file


def outputs(config: DataSource, split: str = "train") -> list[str]:
    found = load_split("alpaca_dataset", config, split, text_columns=("output",), hub_name="a/b")
    return [row["output"] for row in found]


def tokenized(name: str, config: DataSource, tokenizer: Any, split: str = "train", **given: Any) -> Any:
    module = load_dataset_file(BUILT_IN_FOLDER / f"{name}.py")
    return getattr(module, f"get_{name}_dataset")(config, tokenizer, split, **given)


def texts(rows: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """All tokens and the label tokens of each row, decoded."""
    decode = tokenizer.decode
    return [(decode(row["input_ids"]), decode([label for label in row["labels"] if label != -100])) for row in rows]


# Places


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_data(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "data.csv", [{"input": "a", "target": "b"}])
    saved = tmp_path / "saved"
    datasets.Dataset.from_csv(str(file)).save_to_disk(saved)
    for place in (file, saved):  # rows are kept, or tokens alone
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(file / "cache"))
        with pytest.raises(ConfigError, match=f"cannot be kept in {file}/cache .*; make room there, or name another"):
            tokenized("grammar", GrammarDataset(str(place)), tokenizer)
    assert not_kept(OSError(errno.ENOSPC, "No space left on device"))
    refusal = not_kept(OSError("Not enough disk space. Needed: Unknown size"))  # by datasets, before it writes
    assert f"cannot be kept in {file}/cache (No space left on device); make room" in str(refusal)
    assert not_kept(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "other.csv"))) is None


def test_what_else_lies_in_a_folder_of_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts in .md, and those one folder deeper, were left out without a word."""
    write(tmp_path / "a.jsonl", ROWS[:2])
    for name in ("b.md", "c.JSONL", "deeper/d.jsonl", ".hidden"):
        write(tmp_path / name, ROWS[:1])
    assert len(outputs(AlpacaDataset(str(tmp_path), validation_fraction=0.0))) == 2
    assert f"{tmp_path}: no rows are read from b.md, c.JSONL, deeper/\n" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_of_any_format_is_read_in_order(ending: str, streaming: bool, tmp_path: Path) -> None:
    file = write(tmp_path / f"data{ending}", ROWS)
    expected = [row["output"] for row in ROWS]
    assert outputs(AlpacaDataset(str(file), validation_fraction=0.0, streaming=streaming)) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_a_shard_whose_row_group_has_no_rows_is_one_without_rows(streaming: bool, tmp_path: Path) -> None:
    """A filtered table is written so."""
    table = pa.Table.from_pylist(ROWS)
    for number, part in enumerate((table.slice(0, 0), table)):
        pq.write_table(part, tmp_path / f"train-{number}.parquet")
    config = AlpacaDataset(str(tmp_path), validation_fraction=0.0, streaming=streaming)
    assert outputs(config) == [row["output"] for row in ROWS]
    (tmp_path / "train-1.parquet").unlink()
    with pytest.raises(ConfigError, match="holds no rows"):
        outputs(config)


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("train-0.csv", "test-0.csv"),
        ("train/a.json", "test/b.json"),
        ("data/train-0.parquet", "data/test-0.parquet"),
    ],
)
def test_a_folder_holds_splits_by_name(names: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "dataset_infos.json").write_text("{}")  # of the hub's repositories
    (tmp_path / ".git").mkdir()
    for name, rows in zip(names, (ROWS[:30], ROWS[30:]), strict=True):
        write(tmp_path / name, rows)
    config = AlpacaDataset(str(tmp_path), test_split="test")
    assert outputs(config) == [row["output"] for row in ROWS[:30]], "a default gives way to what is there"
    assert outputs(config, "test") == [row["output"] for row in ROWS[30:]]
    assert has_validation("alpaca_dataset", config)


def test_a_folder_with_a_training_split_alone_has_no_validation_unless_one_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    assert outputs(InstructionDataset(str(tmp_path))) == [row["output"] for row in ROWS]
    assert not has_validation("instruction_dataset", InstructionDataset(str(tmp_path)))
    named = InstructionDataset(str(tmp_path), test_split="dev")
    assert has_validation("instruction_dataset", named)
    with pytest.raises(ConfigError, match=r"needs dev\{.*, and has train.jsonl"):
        outputs(named, "dev")


@pytest.mark.parametrize(
    ("train", "validation", "others"),
    [
        ("samsun_train.jsonl", "samsun_validation.jsonl", []),
        ("train.json", "val.json", []),
        ("Alpaca-Train-0.csv", "alpaca.dev.csv", []),
        ("training.v2.jsonl", "valid/a.jsonl", []),
        ("a_train.jsonl", "a_eval.jsonl", ["a_test.jsonl"]),
        ("train.jsonl", "val.jsonl", ["notes.jsonl"]),
        ("captions_train2017.json", "captions_val2017.json", []),
        ("samsumTrain.jsonl", "samsumValid.jsonl", ["samsumTest.jsonl"]),
        ("my_train.csv", "my_test.csv", []),
        ("train.parquet", "test/a.parquet", []),
    ],
)
def test_files_are_splits_by_a_word_of_their_names(
    train: str, validation: str, others: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The validation rows of a folder like llama-recipes' SAMSum were trained on."""
    for name, rows in ((train, ROWS[:30]), (validation, ROWS[30:]), *((other, ROWS[:1]) for other in others)):
        write(tmp_path / name, rows)
    config = SamsumDataset(str(tmp_path))
    assert outputs(config) == [row["output"] for row in ROWS[:30]]
    said = capsys.readouterr().out
    assert f"--alpaca_dataset.data_path: {tmp_path}: " in said
    assert f"validation is {validation}" in said
    assert not others or f"not read: {others[0]}" in said
    assert outputs(config, "validation") == [row["output"] for row in ROWS[30:]]
    assert has_validation("alpaca_dataset", config)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["train_test.jsonl", "train.jsonl"], r"train_test.jsonl could be train or test; rename it"),
        (["a_train.jsonl", "b.jsonl"], r"files named like splits \(a_train.jsonl\) and others \(b.jsonl\)"),
        (["my_test.jsonl"], r"has no file named train, but my_test.jsonl"),
        (["rows_dev.jsonl"], r"needs train.*has rows_dev.jsonl"),
    ],
)
def test_names_that_leave_the_split_open_are_refused(names: list[str], reason: str, tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / name, ROWS)
    with pytest.raises(ConfigError, match=reason):
        outputs(SamsumDataset(str(tmp_path)))
    assert len(outputs(SamsumDataset(f"{tmp_path}/*.jsonl"))) == 40 * len(names), (
        "a glob names files, whatever they say"
    )


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("folder", ["", "train", "data"])
def test_hidden_files_of_a_folder_are_never_read(folder: str, streaming: bool, tmp_path: Path) -> None:
    """Editors, macOS and rsync leave them there."""
    write(tmp_path / folder / "a.jsonl", ROWS[:3])
    for name in (".a.old.jsonl", "._a.jsonl", ".ipynb_checkpoints/a.jsonl", ".train.jsonl"):
        write(tmp_path / folder / name, ROWS[3:])
    config = SamsumDataset(str(tmp_path), streaming=streaming)
    assert outputs(config) == [row["output"] for row in ROWS[:3]]
    assert outputs(SamsumDataset(str(tmp_path / folder / "*.jsonl"))) == [row["output"] for row in ROWS[:3]]


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_the_files_of_a_split_are_listed_with_their_rows(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies that were left there were trained on without a word."""
    for name, number in (("a", 3), ("a (copy)", 2), ("a.bak", 1)):
        write(tmp_path / f"{name}{ending}", ROWS[:number])
    for path in (tmp_path, tmp_path / f"*{ending}"):
        assert len(outputs(SamsumDataset(str(path)))) == 6
        said = capsys.readouterr().out
        listed = f"a (copy){ending} 2, a.bak{ending} 1, a{ending} 3"
        assert f"--alpaca_dataset.data_path: train: 3 files in {tmp_path}, 6 rows: {listed}\n" in said
        assert f"rows are read from a (copy){ending}, a.bak{ending}, which look like copies" in said
    outputs(SamsumDataset(str(tmp_path), streaming=True))
    listed = "2, " if ending == ".parquet" else "0.00 MiB, "
    assert f"a (copy){ending} {listed}" in capsys.readouterr().out


def test_many_files_are_counted_and_one_is_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one.jsonl", ROWS[:1])
    outputs(SamsumDataset(str(tmp_path)))
    assert "1 file" not in capsys.readouterr().out
    for number in range(24):
        write(tmp_path / f"{number:02}.jsonl", ROWS[:1])
    outputs(SamsumDataset(str(tmp_path)))
    assert "25 files" in (said := capsys.readouterr().out)
    assert "19.jsonl 1, 5 more files\n" in said


@pytest.mark.parametrize(
    ("names", "train_split", "test_split"),
    [
        (("part1.jsonl", "part_validation.jsonl"), "part1", "part_validation"),
        (("part1.jsonl", "part_validation.jsonl", "part2.jsonl"), "part1", None),
        (("gtrain_10k.csv", "grammar_validation.csv"), "gtrain_10k", "grammar_validation"),
        (("gtrain_10k.csv", "grammar_validation.csv"), "gtrain_10k.csv", "grammar_validation.csv"),
        (("gtrain_10k.csv", "grammar_validation.csv"), "gtrain_10k", None),
        (("train_test.jsonl", "train_dev.jsonl", "other.jsonl"), "train_test", "train_dev"),
        (("a-1.jsonl", "my_validation.jsonl"), "a", None),
        (("a/x.jsonl", "my_validation.jsonl"), "a", None),
    ],
)
def test_split_names_that_are_given_decide(
    names: tuple[str, ...], train_split: str, test_split: str | None, tmp_path: Path
) -> None:
    """Whatever words the names of files hold; these were refused with "rename them"."""
    for number, name in enumerate(names):
        write(tmp_path / name, ROWS[number : number + 1])
    config = GrammarDataset(str(tmp_path), train_split=train_split, test_split=test_split or "validation")
    assert outputs(config, config.train_split) == [ROWS[0]["output"]]
    assert outputs(config, config.test_split) == [ROWS[1]["output"]]


@pytest.mark.parametrize("first", ["b.jsonl", "[b]*.jsonl", "b.json"])
def test_several_files_are_read_in_their_order(first: str, tmp_path: Path) -> None:
    write(tmp_path / first.replace("[b]*", "b"), ROWS[:15])
    write(tmp_path / "a.jsonl", ROWS[15:])
    config = AlpacaDataset(f"{tmp_path / first}, {tmp_path}/a.jsonl", validation_fraction=0.0)
    assert outputs(config) == [row["output"] for row in ROWS]
    for other, reason in (("c.jsonl", "c.jsonl is no file"), ("", "is no file"), ("c.csv", "several kinds")):
        write(tmp_path / "c.csv", ROWS[:1])
        with pytest.raises(ConfigError, match=reason):
            outputs(replace(config, data_path=f"{tmp_path / first},{tmp_path}/{other}"))


def test_a_list_of_files_becomes_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a,b/one.jsonl"), ROWS)
    write(Path("two.jsonl"), ROWS)
    for given, path in (
        ("two.jsonl,*.jsonl", f"{tmp_path}/two.jsonl,{tmp_path}/*.jsonl"),
        ("a,b/*.jsonl", f"{tmp_path}/a,b/*.jsonl"),
        ("a,b/one.jsonl", f"{tmp_path}/a,b/one.jsonl"),
    ):
        config = parse_flags(["--model_name", "m", "--samsum_dataset.data_path", given])
        found = make_paths_absolute(config, tmp_path).datasets["samsum_dataset"]
        assert found.data_path == path
        assert len(outputs(found)) == 40, "each file once"


@pytest.mark.parametrize("path", ["", "*.jsonl", "**/part*"])
def test_files_without_a_splits_name_are_trained_on_in_the_order_of_their_names(path: str, tmp_path: Path) -> None:
    write(tmp_path / "part1.jsonl", ROWS[:15])
    write(tmp_path / "part2.jsonl", ROWS[15:])
    config = AlpacaDataset(str(tmp_path / path), validation_fraction=0.0)
    assert outputs(config) == [row["output"] for row in ROWS]
    assert not has_validation("alpaca_dataset", config)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_save_to_disk_wrote_is_read(streaming: bool, tmp_path: Path) -> None:
    train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS[:30], ROWS[30:]))
    datasets.DatasetDict(train=train, validation=test).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    for folder in ("both", "one"):
        config = AlpacaDataset(str(tmp_path / folder), validation_fraction=0.0, streaming=streaming)
        assert outputs(config) == [row["output"] for row in ROWS[:30]]
        assert has_validation("alpaca_dataset", config) == (folder == "both")
    assert outputs(AlpacaDataset(str(tmp_path / "both")), "validation") == [row["output"] for row in ROWS[30:]]


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5])
def test_rows_set_aside_for_validation_are_never_trained_on(fraction: float, tmp_path: Path) -> None:
    config = AlpacaDataset(str(write(tmp_path / "data.json", ROWS)), validation_fraction=fraction)
    train, validation = outputs(config), outputs(config, "validation")
    assert len(validation) == max(1, round(40 * fraction))
    assert sorted(train + validation) == sorted(row["output"] for row in ROWS)
    assert train == [row["output"] for row in ROWS if row["output"] in train], "in the order of the file"
    assert has_validation("alpaca_dataset", config)
    assert validation == outputs(config, "validation"), "always the same ones"


def test_alpaca_keeps_rows_for_validation_by_itself(tmp_path: Path) -> None:
    config = AlpacaDataset(str(write(tmp_path / "alpaca_data.json", ROWS)))
    assert len(outputs(config, "validation")) == 1
    assert len(outputs(config)) == 39


# What is refused


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"output": "a"}\n{"output": "b"}\n{"output": \n{"output": "d"}\n', 3),
        ('{"output": "a"}\n\n["b"]\n', 3),
        ('[\n {"output": "a"},\n {"output" "b"}\n]', 3),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_broken_json_is_refused_by_file_and_line(text: str, line: int, streaming: bool, tmp_path: Path) -> None:
    file = tmp_path / ("data.json" if text.startswith("[\n") else "data.jsonl")
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"{file}, line {line}: ") as refusal:
        outputs(AlpacaDataset(str(file), validation_fraction=0.0, streaming=streaming))
    assert "--alpaca_dataset.data_path" in str(refusal.value)


@pytest.mark.parametrize(("name", "start"), [("data.jsonl", '{"output": "a"}\n'), ("data.json", "[")])
@pytest.mark.parametrize("brackets", ["[]", '{"a":0}'])
def test_json_that_is_nested_too_deeply_is_refused(name: str, start: str, brackets: str, tmp_path: Path) -> None:
    """Of 50,000 the reader would end the process, and 5,000 take it minutes."""
    first, inner, last = (brackets[0], "", brackets[-1]) if brackets == "[]" else ('{"a":', "0", "}")

    def write_nested(depth: int) -> Path:
        row = '{"output": "a [[[ \\" {", "more": ' + first * depth + inner + last * depth + "}"
        (tmp_path / name).write_text(start + row + ("]" if start == "[" else "\n"))
        return tmp_path / name

    config = AlpacaDataset(str(write_nested(50)), validation_fraction=0.0)
    assert outputs(config)[-1] == 'a [[[ " {'
    for depth in (100, 50_000):
        write_nested(depth)
        with pytest.raises(
            ConfigError, match=rf"--alpaca_dataset.data_path: {tmp_path / name}.*nested (10[12]|50,00[12]) deep"
        ):
            outputs(config)


@pytest.mark.parametrize(
    "name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "a 1.jsonl", "{a1,b}.jsonl", "ä\n.jsonl", "\udcff.jsonl"]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_is_itself_whatever_its_name_would_match(name: str, streaming: bool, tmp_path: Path) -> None:
    write(tmp_path / "a1.jsonl", ROWS[:3])
    write(tmp_path / name, ROWS[3:5])
    config = AlpacaDataset(str(tmp_path / name), validation_fraction=0.0, streaming=streaming)
    assert outputs(config) == [row["output"] for row in ROWS[3:5]]


def test_links_under_a_glob_are_followed_and_give_no_row_twice(tmp_path: Path) -> None:
    write(tmp_path / "books/one/train.jsonl", ROWS[:3])
    write(tmp_path / "books/two.jsonl", ROWS[3:5])
    write(tmp_path / "elsewhere/deep/three.jsonl", ROWS[5:6])
    write(tmp_path / "books/.hidden/four.jsonl", ROWS[6:7])
    for name in ("up", "again", "once_more"):  # paths through these are without end
        (tmp_path / "books/one" / name).symlink_to(tmp_path / "books")
    (tmp_path / "books/other").symlink_to(tmp_path / "elsewhere")
    for pattern in ("books/**/*.jsonl", "bo*/**/**/*.jsonl", "**/b*/**/*.jsonl"):
        found = outputs(AlpacaDataset(str(tmp_path / pattern), validation_fraction=0.0))
        assert sorted(found) == sorted(row["output"] for row in ROWS[:6]), pattern


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("a.jsonl", "b.jsonl"),
        ("train-0.jsonl", "train-1.jsonl"),
        ("train/a.jsonl", "b.jsonl"),
        ("a_train.jsonl", "b_train.jsonl"),
    ],
)
def test_a_link_in_a_folder_gives_no_row_twice(name: str, link: str, tmp_path: Path) -> None:
    file = write(tmp_path / name, ROWS[:3])
    (file.parent / link).symlink_to(file)
    assert outputs(SamsumDataset(str(tmp_path))) == [row["output"] for row in ROWS[:3]]


@pytest.mark.parametrize("split", ["dev", "*", "[a-z]*"])
def test_a_training_split_that_is_not_there_is_not_replaced_by_another(split: str, tmp_path: Path) -> None:
    write(tmp_path / "validation.jsonl", ROWS[:2])
    for test_split in ("validation", "test"):
        config = AlpacaDataset(str(tmp_path), train_split=split, test_split=test_split)
        with pytest.raises(ConfigError, match=r"validation\.jsonl.*name"):
            outputs(config, split)


def test_a_split_that_is_not_there_is_refused_by_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "validation.jsonl", ROWS)
    saved = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), dev=datasets.Dataset.from_list(ROWS))
    saved.save_to_disk(tmp_path / "saved")
    for folder, split, there in ((tmp_path, "dev", "train.jsonl"), (tmp_path / "saved", "validation", "train, dev")):
        config = SamsumDataset(str(folder), test_split=split)
        with pytest.raises(ConfigError, match=rf"{split}.*{there}.*--alpaca_dataset.train_split"):
            outputs(config, split)


def test_a_share_is_refused_where_validation_rows_are_there_or_none_would_be_left(tmp_path: Path) -> None:
    write(tmp_path / "a/train.jsonl", ROWS)
    write(tmp_path / "a/validation.jsonl", ROWS)
    config = AlpacaDataset(str(tmp_path / "a"), validation_fraction=0.5)
    with pytest.raises(ConfigError, match=r"--alpaca_dataset.validation_fraction.*has the split validation"):
        outputs(config)
    config = replace(config, data_path=str(write(tmp_path / "one.jsonl", ROWS[:1])))
    with pytest.raises(ConfigError, match="leaves none to train on"):
        outputs(config)
    with pytest.raises(ConfigError, match="stream"):
        outputs(replace(config, streaming=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent", "does not exist"), ("none", "holds no"), ("mixed", "several kinds"), ("*.nothing", "holds no")],
)
def test_places_without_usable_files_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none/readme.md").write_text("nothing")
    write(tmp_path / "mixed/a.jsonl", ROWS)
    write(tmp_path / "mixed/b.csv", ROWS)
    with pytest.raises(ConfigError, match=reason) as refusal:
        outputs(AlpacaDataset(str(tmp_path / name)))
    assert str(tmp_path / name) in str(refusal.value)


def test_a_dataset_without_a_default_place_needs_one(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"--instruction_dataset\.data_path: is required"):
        tokenized("instruction", InstructionDataset(), tokenizer)


@pytest.mark.parametrize("empty", [None, float("nan")])  # pandas writes the second
def test_a_row_that_is_not_text_is_refused_by_its_number_in_the_file(
    empty: float | None, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [dict(row) for row in ROWS]
    config = AlpacaDataset(str(write(tmp_path / "data.jsonl", rows)), validation_fraction=0.5)
    found = load_split("alpaca_dataset", config, "train", text_columns=("output",))
    at = found.row_number(7)
    rows[at - 1] |= {"output": empty, "input": empty}
    write(tmp_path / "data.jsonl", rows)
    with pytest.raises(ConfigError, match=rf"data.jsonl, row {at}: column output is empty"):
        tokenized("alpaca", config, tokenizer)
    rows[at - 1]["output"] = "So."
    write(tmp_path / "data.jsonl", rows)
    assert not any("### Input:\nnan" in text for text, _ in texts(tokenized("alpaca", config, tokenizer), tokenizer))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_row_of_one_of_several_files_is_named_with_its_file(ending: str, tokenizer: Any, tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS[:9]]
    rows[5]["output"] = None
    for number in range(3):
        write(tmp_path / f"{number}{ending}", rows[3 * number : 3 * number + 3])
    place = rf"{tmp_path}, row 6 \(row 3 of {tmp_path}/1{ending}\): column output is empty"
    for fraction in (0.0, 0.1):
        with pytest.raises(ConfigError, match=place):
            tokenized("alpaca", AlpacaDataset(str(tmp_path), validation_fraction=fraction), tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_chat_without_an_assistant_is_refused_by_its_row(streaming: bool, tmp_path: Path) -> None:
    turn = {"role": "user", "content": "Hi"}
    rows = [{"messages": [turn, {"role": "assistant", "content": "Hi."}]}] * 3 + [{"messages": [turn]}]
    config = ChatDataset(str(write(tmp_path / "chats.jsonl", rows)), streaming=streaming)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/chats.jsonl, row 4: it has no assistant turn"):
        list(tokenized("chat", config, FAMILIES["ChatML"].tokenizer()))


def test_a_chat_without_turns_or_an_instruction_without_columns_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    file = str(write(tmp_path / "data.jsonl", [{"text": "Hi"}]))
    with pytest.raises(ConfigError, match=r"no column messages or conversations.*--chat_dataset.messages_column"):
        tokenized("chat", ChatDataset(file), FAMILIES["ChatML"].tokenizer())
    with pytest.raises(
        ConfigError, match=r"no column prompt, completion.*has text.*--instruction_dataset.prompt_column"
    ):
        tokenized("instruction", InstructionDataset(file), tokenizer)


# Formats


def test_alpacas_prompt_says_whether_there_is_an_input(tokenizer: Any, tmp_path: Path) -> None:
    config = AlpacaDataset(str(write(tmp_path / "data.json", ROWS)), validation_fraction=0.0)
    for number, (text, labelled) in enumerate(texts(tokenized("alpaca", config, tokenizer), tokenizer)):
        assert ("### Input:\n" in text) == (number % 2 == 0)
        assert f"### Instruction:\nName number {number}." in text
        assert labelled.strip() == f"It is {number}.</s>"


@pytest.mark.parametrize(
    ("rows", "flags", "whole", "labelled"),
    [
        ({"prompt": "A b", "completion": " c"}, {}, "A b c", "c"),
        ({"question": "Why?", "answer": "So."}, {}, "Question: Why?\nAnswer:\nSo.", "So."),
        ({"instruction": "Do", "output": "Done"}, {}, "### Instruction:\nDo\n\n### Response:\nDone", "Done"),
        ({"q": "Why?", "a": "So."}, {"prompt_column": "q", "completion_column": "a"}, "Why?So.", "So."),
        (
            {"q": "Why", "c": "x", "a": "y"},
            {"input_column": "c", "prompt_column": "q", "completion_column": "a"},
            "Why\n\nxy",
            "y",
        ),
        ({"prompt": "A", "completion": "b"}, {"prompt_template": "<{prompt}>\\n"}, "<A>\nb", "b"),
    ],
)
def test_instructions_by_the_names_of_their_columns(
    rows: dict[str, str], flags: dict[str, str], whole: str, labelled: str, tokenizer: Any, tmp_path: Path
) -> None:
    config = InstructionDataset(str(write(tmp_path / "data.jsonl", [rows] * 2)), **flags)
    for text, answer in texts(tokenized("instruction", config, tokenizer), tokenizer):
        assert text.removesuffix("</s>").endswith(whole)
        assert answer.removesuffix("</s>").strip().endswith(labelled)
        assert text.endswith("</s>")


@pytest.mark.parametrize(("by", "number"), [("line", 3), ("paragraph", 2), ("document", 1)])
def test_plain_text_has_labels_throughout(by: Any, number: int, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Anna says hi.\nBob too.\n\nThe end.\n")
    rows = texts(tokenized("text", TextDataset(str(tmp_path / "book.txt"), sample_by=by), tokenizer), tokenizer)
    rows = [row for row in rows if row[1]]  # an empty line is not learned
    assert len(rows) == number
    assert all(text.removeprefix("<s>").strip() == labelled.strip() for text, labelled in rows)


def test_a_stream_gives_the_rows_that_reading_whole_gives(tokenizer: Any, tmp_path: Path) -> None:
    config = AlpacaDataset(str(write(tmp_path / "data.jsonl", ROWS)), validation_fraction=0.0)
    whole = tokenized("alpaca", config, tokenizer)
    stream = tokenized("alpaca", replace(config, streaming=True), tokenizer)
    assert isinstance(stream, TokenizedStream)
    stream = pickle.loads(pickle.dumps(stream))  # as for a spawned worker process
    for streamed, row in zip(stream, whole, strict=True):
        assert list(streamed["input_ids"]) == row["input_ids"]
        assert list(streamed["labels"]) == row["labels"]


# --split_slice


def sliced(config: DataSource, split: str, split_slice: str | None, tokenizer: Any, *, cuts_itself: bool) -> list[Any]:
    """The sequences of a slice, by the built-in function or by one of a user that tokenizes the whole split."""
    function = find_dataset_function("alpaca_dataset", config)
    build = partial(build_sequences, context_length=1024)

    def tokenizes_all(dataset_config: Any, tokenizer: Any, split: str) -> Any:
        return function(dataset_config, tokenizer, split)

    chosen = function if cuts_itself else tokenizes_all
    found = load_sequences(chosen, config, tokenizer, split, split_slice=split_slice, build=build)
    return [(ids.tolist(), labels.tolist(), row) for ids, labels, row in found]


@pytest.mark.parametrize("split_slice", ["1", "7", "30%", "1%", "999", None])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_slice_is_cut_before_tokenizing_and_holds_the_same_sequences(
    split: str, split_slice: str | None, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AlpacaDataset(str(write(tmp_path / "data.jsonl", ROWS)), validation_fraction=0.3)
    wanted = sliced(config, split, split_slice, tokenizer, cuts_itself=False)
    num_in_split = {"train": 28, "validation": 12}[split]
    num_tokenized = []

    def count(examples: Any, *rest: Any, **options: Any) -> Any:
        num_tokenized.append(len(examples))
        return tokenize_spans(examples, *rest, **options)

    monkeypatch.setattr(loss_mask, "tokenize_spans", count)
    assert sliced(config, split, split_slice, tokenizer, cuts_itself=True) == wanted
    kept = {"1": 1, "7": 7, "30%": round(0.3 * num_in_split), "1%": 1}.get(str(split_slice), num_in_split)
    assert len(wanted) == kept
    assert sum(num_tokenized) == (0 if split_slice is None else kept), "the whole split was cached above"


def test_slices_of_one_split_are_cached_apart(tokenizer: Any, tmp_path: Path) -> None:
    config = AlpacaDataset(str(write(tmp_path / "data.jsonl", ROWS)), validation_fraction=0.0)
    for _ in range(2):
        for split_slice, number in (("5", 5), (None, 40), ("50%", 20), ("6", 6)):
            found = sliced(config, "train", split_slice, tokenizer, cuts_itself=True)
            assert [row for _, _, row in found] == list(range(number))


def _messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": f"A number, {number}."}]


ROW_OF = {
    "alpaca": ROWS.__getitem__,
    "caption": lambda number: {"image": f"{number}.png", "text": f"Picture {number}."},
    "chat": lambda number: {"messages": _messages(number)},
    "classification": lambda number: {"text": f"It is {number}.", "label": number % 2},
    "grammar": lambda number: {"input": f"He have {number}.", "target": f"He has {number}."},
    "instruction": lambda number: {"prompt": f"Name {number}.", "completion": f"It is {number}."},
    "preference": lambda number: {
        "prompt": f"What is {number}?",
        "chosen": f"A number, {number}.",
        "rejected": f"Not {number}.",
    },
    "samsum": lambda number: {"dialogue": f"Ann: Is it {number}?", "summary": f"Ann asks for {number}."},
    "segments": lambda number: {"segments": [{"text": f"It is {number}.", "label": True}]},
    "text": lambda number: {"text": f"It is {number}."},
    "tokenized": lambda number: {"input_ids": [5, 6, 7 + number]},
}


@pytest.mark.parametrize("name", sorted({file.stem for file in BUILT_IN_FOLDER.glob("*.py")} - {"custom_example"}))
def test_every_built_in_dataset_tokenizes_its_slice_alone(name: str, tmp_path: Path) -> None:
    """The function itself returns these rows and no more: nothing after it has to throw tokens away."""
    settings = DATASETS["custom_dataset" if name == "tokenized" else f"{name}_dataset"]
    config = settings(str(write(tmp_path / "data.jsonl", [ROW_OF[name](number) for number in range(6)])))
    chatml: Any = FAMILIES["ChatML"].tokenizer()
    reads = SimpleNamespace(tokenizer=chatml) if name == "caption" else chatml  # a processor reads images, too
    whole, cut = (
        [{column: np.asarray(value).tolist() for column, value in row.items()} for row in found]
        for found in (tokenized(name, config, reads), tokenized(name, config, reads, split_slice="2"))
    )
    assert len(whole) > 2
    assert cut == whole[:2]


# The cache


def test_tokenized_rows_are_kept_until_rows_tokenizer_or_settings_change(tokenizer: Any, tmp_path: Path) -> None:
    config = InstructionDataset(str(write(tmp_path / "data.jsonl", [{"prompt": "A", "completion": "b"}] * 3)))

    def file() -> str:
        return tokenized("instruction", config, tokenizer).cache_files[0]["filename"]

    first = file()
    made = Path(first).stat().st_mtime_ns
    assert file() == first
    assert Path(first).stat().st_mtime_ns == made, "found, not made again"
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert tokenized("instruction", config, other).cache_files[0]["filename"] == first
    other.add_tokens(["<new>"])
    assert tokenized("instruction", config, other).cache_files[0]["filename"] != first
    config = replace(config, prompt_template="{prompt}:")
    assert file() != first
    config = replace(config, prompt_template=None)
    write(tmp_path / "data.jsonl", [{"prompt": "A", "completion": "c"}] * 3)
    assert file() != first


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_line_counts_answers_that_change_the_tokens_of_their_prompt(
    as_chat: bool, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": "Who? ", "completion": "Anna"}, {"prompt": "Who?", "completion": " Anna"}]
    config = InstructionDataset(str(write(tmp_path / "data.jsonl", rows)), as_chat=as_chat)
    if as_chat:  # whose template puts its own text between the two
        tokenizer = FAMILIES["ChatML"].tokenizer()
    build = partial(build_sequences, context_length=64)
    function = find_dataset_function("instruction_dataset", config)
    sequences = load_sequences(function, config, tokenizer, "train", split_slice=None, build=build)
    assert sequences.num_answers_joined == (0 if as_chat else 1)
    lines = [line for line in sequences.describe("train") if "begins in the prompt in 1 example, " in line]
    assert len(lines) == (0 if as_chat else 1)
