"""Files of tokenized rows, and settings that a user's function does not read."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.datasets import CustomDataset
from configs.flags import parse_flags
from configs.training import TrainConfig
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import RunData, load_data, load_sequences
from data.sequences.causal import build_sequences
from data.sequences.tokenized import check_token_ids
from tests.helpers.refusals import Bench
from utils.errors import ConfigError

ROWS = [{"input_ids": [5, 6, 7, number], "labels": [-100, 6, 7, number], "id": number} for number in range(8)]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(config: CustomDataset, **settings: Any) -> RunData:
    train_config = TrainConfig(model_name="m", dataset="custom_dataset", max_train_step=2, **settings)
    options: dict[str, Any] = {"build_sequences": build_sequences, "vocab_size": 90, "context_length": 8}
    return load_data(train_config, {"custom_dataset": config}, None, **options)


def sequences(config: CustomDataset) -> list[tuple[list[int], list[int]]]:
    function, build = find_dataset_function("custom_dataset", config), partial(build_sequences, context_length=8)
    found = load_sequences(function, config, None, "train", split_slice=None, build=build)
    return [(ids.tolist(), labels.tolist()) for ids, labels, _ in found]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_file_of_tokenized_rows_is_read(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six shipped capitals were trained on instead."""
    file = write(tmp_path / f"rows{ending}", ROWS)
    data = load(CustomDataset(str(file), validation_fraction=0.25))
    assert data.evaluation is not None
    found = [sequence.input_ids.tolist() for split in (data.train, data.evaluation) for sequence in split]
    assert sorted(found) == sorted(row["input_ids"] for row in ROWS)
    assert "columns that are not read: id\n" in capsys.readouterr().out
    (note,) = load(CustomDataset(str(file))).notes
    assert "validation: none" in note
    streamed = load(CustomDataset(str(file), streaming=True), run_validation=False)
    assert [sequence.input_ids.tolist() for sequence in streamed.train] == [row["input_ids"] for row in ROWS]


def test_labels_and_mask_are_optional(tmp_path: Path) -> None:
    ids = [5, 6, 7]
    assert sequences(CustomDataset(str(write(tmp_path / "a.jsonl", [{"input_ids": ids}])))) == [(ids, [-100, 6, 7])]
    masked = {"input_ids": [0, *ids], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 6, 7]}
    assert sequences(CustomDataset(str(write(tmp_path / "b.jsonl", [masked])))) == [(ids, [-100, 6, 7])]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"labels": [5]}, "column input_ids is not a list of token ids"),
        ({"input_ids": [5, 6]}, "column labels is not a list of token ids"),
        ({"input_ids": "5 6", "labels": [5, 6]}, "column input_ids is not a list of token ids"),
        ({"input_ids": [5, 6.5], "labels": [5, 6]}, "column input_ids .* holds numbers with a fraction"),
        ({"input_ids": ["5", "6"], "labels": [5, 6]}, "column input_ids .* holds texts"),
        ({"input_ids": [5, True], "labels": [5, 6]}, "column input_ids .* holds True and False"),
        ({"input_ids": [5, 6], "labels": [True, False]}, "column labels .* holds True and False"),
        ({"input_ids": [5, None], "labels": [5, 6]}, "column input_ids .* holds values of other kinds"),
        ({"input_ids": [[5], [6]], "labels": [5, 6]}, "column input_ids is not one list of whole numbers"),
        ({"input_ids": [5, 2**40], "labels": [5, 6]}, "1099511627776 in column input_ids is no token id"),
        ({"input_ids": [5, -(2**40)], "labels": [5, 6]}, "-1099511627776 in column input_ids is no token id"),
    ],
)
def test_a_row_without_tokens_is_refused_or_left_out(bad: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = CustomDataset(str(write(tmp_path / "rows.jsonl", [ROWS[0], bad, ROWS[2]])))
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 2: {reason}; .*--skip_bad_rows"):
        load(config)
    train = load(replace(config, skip_bad_rows=True)).train
    assert (train.source_rows.tolist(), train.num_empty) == ([0, 2], 1)


MASKS = {
    "numbers": ([5, -1, 1], "needs a 0 or a 1 for each token, and holds 5"),
    "documents": ([1, 1, 2], "needs a 0 or a 1 for each token, and holds 2"),
    "fractions": ([1.0, 0.5, 1.0], "needs a 0 or a 1 for each token, and holds 0.5"),
    "texts": (["1", "0", "1"], "needs a 0 or a 1 for each token"),
    "nulls": ([1, None, 1], "needs a 0 or a 1 for each token"),
    "lists": ([[1], [1, 0]], "needs a 0 or a 1 for each token"),
    "a number": (1, "needs a 0 or a 1 for each token"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", MASKS)
def test_a_mask_of_anything_but_zeros_and_ones_is_refused(case: str, streaming: bool, tmp_path: Path) -> None:
    """[5, -1, 1] was taken for ones, and texts, too."""
    mask, reason = MASKS[case]
    ids = {"input_ids": [5, 6, 7]}
    rows = [{**ids, "attention_mask": [1, 1, 0]}, {**ids, "attention_mask": mask}, ids]
    config = CustomDataset(str(write(tmp_path / "rows.jsonl", rows)), streaming=streaming)
    with pytest.raises(ConfigError, match=f"rows.jsonl, row 2: column attention_mask {reason}.*--skip_bad_rows"):
        load(config, run_validation=False)
    (first, _) = load(replace(config, skip_bad_rows=True), run_validation=False).train
    assert first.input_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [5, -6, 7], "labels": [5, 6, 7]}, "token id -6 is outside .*below 0"),
        ({"input_ids": [5, 600, 7], "labels": [5, 6, 7]}, "token id 600 is outside .*another tokenizer"),
        ({"input_ids": [5, 6, 7], "labels": [5, -1, 7]}, "label -1 is outside .*only -100, for labels, may be below 0"),
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 700]}, "label 700 is outside"),
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": [5, -1, 1]}, "column attention_mask needs"),
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 7], "sample_lengths": [5, -2]}, "sample_lengths add up to 3"),
        (
            {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "completion_mask": [0, 2, 1]},
            "completion_mask .*holds 2",
        ),
    ],
)
@pytest.mark.parametrize("table", [False, True])
def test_rows_of_a_users_function_are_refused_by_their_dataset_and_row(
    row: dict[str, Any], reason: str, table: bool
) -> None:
    """The message called every such dataset `num_by_turns`."""
    good = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], **{name: [1, 1, 1] for name in row if name.endswith("mask")}}
    good |= {"sample_lengths": [2, 1]} if "sample_lengths" in row else {}
    rows: Any = datasets.Dataset.from_list([good, good, row]) if table else [good, good, row]
    with pytest.raises(ConfigError, match=rf"dataset \(mine\), row 3: .*{reason}"):
        check_token_ids(build_sequences(rows, name="mine", context_length=8), 90, "mine")


def test_a_file_of_text_is_no_file_of_tokenized_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"text": "Hi"}])
    with pytest.raises(ConfigError, match=r"no column input_ids; it has text, .*--custom_dataset.file"):
        load(CustomDataset(str(file)))


def test_no_dataset_is_sample_data_by_default(bench: Bench) -> None:
    message = bench.refused("--dataset", "custom_dataset")
    assert "--custom_dataset.file: is required; give FILE.py:FUNCTION, or" in message
    assert "--custom_dataset.data_path" in message


# Settings that a function does not read


FUNCTION = """
def get_custom_dataset(dataset_config, tokenizer, split):
    path = {read}
    {gives} [{{"input_ids": [5, 6], "labels": [5, 6]}}]
"""


@pytest.mark.parametrize("gives", ["return", "yield from"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("read", "is_read"), [("None", False), ("dataset_config.data_path", True), ("vars(dataset_config)", True)]
)
def test_a_path_that_the_function_does_not_read_is_refused(
    read: str, is_read: bool, gives: str, streaming: bool, tmp_path: Path
) -> None:
    (tmp_path / "data.py").write_text(FUNCTION.format(read=read, gives=gives))
    config = CustomDataset("rows.jsonl", file=str(tmp_path / "data.py"), streaming=streaming)
    if is_read:
        assert len(load(config).train) == 1
        return
    with pytest.raises(ConfigError, match=rf"--custom_dataset.data_path: {tmp_path}/data.py never reads it; .*leave"):
        load(config)
    assert len(load(replace(config, data_path=None)).train) == 1


def test_the_short_form_still_names_the_file() -> None:
    config = parse_flags(["--model_name", "m", "--dataset", "f.py:g"])
    assert config.custom_dataset.file == "f.py:g"
