"""Folders of `save_to_disk`: their JSON files name files in the folder, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.formats import DATASETS
from data.splits.reading import load_split
from utils.errors import ConfigError

ROWS = {"text": ["one", "two"]}


def read(folder: Path, *, streaming: bool = False) -> list[str]:
    config = DATASETS["text_dataset"](data_path=str(folder), streaming=streaming)  # type: ignore[call-arg]
    return [row["text"] for row in load_split("text_dataset", config, "train", text_columns=["text"])]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", ["../other/{}", "{folder}/other/{}", "a/../../other/{}"])
def test_a_file_outside_of_the_folder_is_refused(way: str, streaming: bool, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "other")
    state = json.loads((saved / "state.json").read_text())
    (entry,) = state["_data_files"]
    state["_data_files"] = [{"filename": way.format(entry["filename"], folder=tmp_path)}]
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"state.json names '.*other.*', which is no place in .*saved"):
        read(saved, streaming=streaming)


def test_a_split_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == ROWS["text"]
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "../other"]}))
    with pytest.raises(ConfigError, match=r"dataset_dict.json names '../other', which is no place"):
        read(tmp_path / "saved")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("null", "state.json has no list _data_files"),
        ("[]", "state.json has no list _data_files"),
        ('{"_data_files": 5}', "state.json has no list _data_files"),
        ('{"_data_files": [5]}', "state.json names None, which is no place"),
        ('{"_data_files": [{"filename": 1e999}]}', "state.json names inf, which is no place"),
        ('{"_data_files": [{"filename": "a.arrow"}]}', "state.json names a.arrow, which is no file"),
        ("[" * 20_000, "nested too deeply"),
    ],
)
def test_a_state_of_wrong_types_is_refused_in_plain_words(state: str, reason: str, saved: Path) -> None:
    (saved / "state.json").write_text(state)
    with pytest.raises(ConfigError, match=f"{saved} could not be read .*{reason}.*save it again"):
        read(saved)


def test_a_pipe_in_place_of_the_rows_is_not_waited_for(saved: Path) -> None:
    (file,) = saved.glob("*.arrow")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="which is no file"):
        read(saved)


def test_links_of_the_folder_may_lead_out_of_it(saved: Path, tmp_path: Path) -> None:
    """The hub's cache is made of such."""
    files: list[Any] = list(saved.glob("*.arrow"))
    for file in files:
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert read(saved) == ROWS["text"]
