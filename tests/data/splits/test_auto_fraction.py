"""--NAME.validation_fraction auto: a share of the examples where there is no validation data, and never too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.flags import parse_flags
from data.splits.reading import load_split
from utils.errors import ConfigError


def num_rows(folder: Path, *more: str) -> tuple[int, int]:
    given = ["--model_name", "M", "--dataset", "text_dataset", "--text_dataset.data_path", str(folder), *more]
    config = parse_flags(given).datasets["text_dataset"]
    splits = [load_split("text_dataset", config, split, text_columns=["text"]) for split in ("train", "validation")]
    train, held_out = (len(split.data) for split in splits)
    return train, held_out


def write(file: Path, count: int) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(count)))
    return file


AUTO = ["--text_dataset.validation_fraction", "auto"]


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (200, 10), (20_000, 500)])
def test_a_twentieth_is_held_out_and_at_most_500_examples(count: int, held_out: int, tmp_path: Path) -> None:
    assert num_rows(write(tmp_path / "rows.jsonl", count), *AUTO) == (count - held_out, held_out)


def test_validation_data_of_its_own_is_evaluated_on_instead(tmp_path: Path) -> None:
    write(tmp_path / "rows/train.jsonl", 40)
    write(tmp_path / "rows/validation.jsonl", 3)
    assert num_rows(tmp_path / "rows", *AUTO) == (40, 3)
    with pytest.raises(ConfigError, match="has the split validation; leave this out"):
        num_rows(tmp_path / "rows", "--text_dataset.validation_fraction", "0.05")


def test_other_words_are_no_share() -> None:
    with pytest.raises(ConfigError, match=r"--text_dataset\.validation_fraction: 'most' is not auto or a number"):
        parse_flags(["--model_name", "M", "--text_dataset.validation_fraction", "most"])
