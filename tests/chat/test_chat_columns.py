"""What the columns of a file of conversations decide before a row is read; JSON and Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError

ChatDataset = DATASETS["chat_dataset"]
QUESTION, ANSWER = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def learned(file: Path, **settings: Any) -> list[str]:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    config = ChatDataset(str(file), **settings)
    rows = find_dataset_function("chat_dataset", config)(config, tokenizer, "train")
    return [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in rows]


def test_nulls_inside_arguments_are_learned_from_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [QUESTION, call({"city": "Lima", "unit": None})]}, {"messages": [QUESTION, call({"zone": 3})]}]
    (tmp_path / "calls.json").write_text(json.dumps(rows))
    texts = learned(tmp_path / "calls.json")
    assert '"arguments": {"city": "Lima", "unit": null}' in texts[0]
    assert '"arguments": {"zone": 3}' in texts[1]
    assert "nulls inside" not in capsys.readouterr().out


def test_the_nulls_that_parquet_adds_are_not_learned_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": [call({"city": "Lima", "zone": None})]}, {"messages": [call({"city": None, "zone": 3})]}]
    whole = [{"messages": [QUESTION | {"tool_calls": None}, *row["messages"]]} for row in rows]
    datasets.Dataset.from_list(whole).to_parquet(tmp_path / "calls.parquet")
    texts = learned(tmp_path / "calls.parquet")
    assert '"arguments": {"city": "Lima"}' in texts[0]
    assert '"arguments": {"zone": 3}' in texts[1]
    assert "calls.parquet: nulls inside the arguments of calls are left out" in capsys.readouterr().out


def test_a_column_of_images_is_refused_without_reading_one(tmp_path: Path) -> None:
    images = datasets.List(datasets.Image())
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    rows = {"messages": [[QUESTION, ANSWER]], "images": [[{"path": None, "bytes": b"no image"}]]}
    features = datasets.Features({"messages": datasets.List(turn), "images": images})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "images.parquet")
    with pytest.raises(ConfigError, match=r"images.parquet: column images holds images, sound or video.*text alone"):
        learned(tmp_path / "images.parquet")


def test_turns_in_two_columns_are_refused_and_one_can_be_named(tmp_path: Path) -> None:
    row = {"messages": [QUESTION, ANSWER], "conversations": [QUESTION, {"from": "gpt", "value": "Yes."}]}
    (tmp_path / "two.json").write_text(json.dumps([row]))
    with pytest.raises(
        ConfigError, match=r"turns in messages and conversations; name one with --chat_dataset.messages"
    ):
        learned(tmp_path / "two.json")
    assert learned(tmp_path / "two.json", messages_column="conversations") == ["Yes.<|im_end|>"]


def test_what_is_beside_the_turns_is_listed_as_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "Rain?", "messages": [QUESTION, ANSWER], "id": 1, "image": "of what it is about"}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    assert learned(tmp_path / "rows.json") == ["No.<|im_end|>"]
    assert "columns that are not read: prompt, id, image\n" in capsys.readouterr().out
