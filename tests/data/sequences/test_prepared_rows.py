"""Rows that TRL has prepared: its masks say what is learned, and its lengths where each text of a packed row ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.datasets import CustomDataset
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import load_sequences
from data.sequences.causal import build_sequences
from utils.errors import ConfigError

IDS = [5, 6, 7, 8, 9]
CASES: dict[str, tuple[dict[str, Any], list[tuple[list[int], list[int]]]]] = {
    "completion_mask": ({"completion_mask": [0, 0, 1, 1, 1]}, [(IDS, [-100, -100, 7, 8, 9])]),
    "assistant_masks": ({"assistant_masks": [0, 1, 0, 0, 1]}, [(IDS, [-100, 6, -100, -100, 9])]),
    "loss_mask": ({"loss_mask": [False, True, True, False, True]}, [(IDS, [-100, 6, 7, -100, 9])]),
    "both": (
        {"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]},
        [(IDS, [-100, -100, 7, -100, 9])],
    ),
    "with labels": (
        {"labels": [-100, 6, 7, -100, 9], "completion_mask": [0, 0, 1, 1, 1]},
        [(IDS, [-100, -100, 7, -100, 9])],
    ),
    "seq_lengths": ({"seq_lengths": [2, 3]}, [([5, 6], [-100, 6]), ([7, 8, 9], [-100, 8, 9])]),
    "position_ids": ({"position_ids": [0, 1, 0, 1, 2]}, [([5, 6], [-100, 6]), ([7, 8, 9], [-100, 8, 9])]),
    "one text's position_ids": ({"position_ids": [0, 1, 2, 3, 4]}, [(IDS, [-100, 6, 7, 8, 9])]),
    "lengths and a mask": (
        {"seq_lengths": [2, 3], "completion_mask": [0, 1, 0, 0, 1]},
        [([5, 6], [-100, 6]), ([7, 8, 9], [-100, -100, 9])],
    ),
}


def found(rows: list[dict[str, Any]], folder: Path, ending: str, **settings: Any) -> list[tuple[list[int], list[int]]]:
    file, data = folder / f"rows{ending}", datasets.Dataset.from_list(rows)
    data.to_parquet(file) if ending == ".parquet" else data.to_json(file)
    config = CustomDataset(str(file), **settings)
    function, build = find_dataset_function("custom_dataset", config), partial(build_sequences, context_length=8)
    sequences = load_sequences(function, config, None, "train", split_slice=None, build=build)
    return [(ids.tolist(), labels.tolist()) for ids, labels, _ in sequences]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("case", CASES)
def test_masks_and_lengths_are_read(case: str, ending: str, streaming: bool, tmp_path: Path) -> None:
    more, sequences = CASES[case]
    rows = [{"input_ids": IDS, **more}, {"input_ids": IDS, **more}]
    assert found(rows, tmp_path, ending, streaming=streaming) == sequences * 2


def test_a_dataset_of_a_users_function_is_read_so_too() -> None:
    rows = datasets.Dataset.from_list([{"input_ids": IDS, "labels": IDS, "completion_mask": [0, 0, 1, 1, 1]}] * 2)
    flat = build_sequences(rows, name="mine", context_length=8)
    assert [sequence.labels.tolist() for sequence in flat] == [[-100, -100, 7, 8, 9]] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"completion_mask": [0, 1]}, "row 1: column completion_mask needs a 0 or a 1 for each of the 5 tokens"),
        ({"assistant_masks": [0, 2, 1, 1, 1]}, "row 1: column assistant_masks needs a 0 or a 1"),
        ({"seq_lengths": [2, 2]}, "row 1: column seq_lengths does not add up to the 5 tokens"),
        ({"prompt_mask": [1, 1, 0, 0, 0]}, "column prompt_mask seems to say which tokens are learned, and is not read"),
    ],
)
def test_what_does_not_fit_or_is_not_known_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        found([{"input_ids": IDS, **more}], tmp_path, ".jsonl")
