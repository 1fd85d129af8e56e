"""Rows that were padded without a mask, and answers with two end tokens, are named at the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from configs.datasets import CustomDataset
from configs.training import TrainConfig
from data.pipeline import load_data
from data.sequences.causal import build_sequences
from data.sequences.ends import num_with_learned_padding
from data.sequences.tokenized import Sequences

PAD, END = 0, 2
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)


def lines(rows: list[dict[str, Any]], tmp_path: Path, **settings: Any) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, tokenizer = CustomDataset(str(file), **settings), cast(Any, TOKENIZER)
    train_config = TrainConfig(model_name="m", max_train_step=1)
    options: dict[str, Any] = {"build_sequences": build_sequences, "vocab_size": 50, "context_length": 16}
    data = load_data(train_config, {"custom_dataset": config}, tokenizer, **options)
    return [note for note in data.notes if "several times in a row" in note]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "is_named"),
    [
        ({"input_ids": [5, 6, 7, END, PAD, PAD, PAD]}, True),  # the labels of a tutorial: the inputs, copied
        ({"input_ids": [5, 6, 7, END, END, END]}, True),  # pad_token = eos_token
        ({"input_ids": [PAD, PAD, PAD, 5, 6, 7, END]}, True),
        ({"input_ids": [5, 6, 7, END, END]}, True),  # a template's end token, and one more
        ({"input_ids": [5, 6, 7, END]}, False),
        ({"input_ids": [5, 6, 7, 7, 7]}, False),
        ({"input_ids": [5, 6, 7, END, PAD, PAD], "attention_mask": [1, 1, 1, 1, 0, 0]}, False),
        ({"input_ids": [5, 6, 7, END, PAD, PAD], "labels": [-100, 6, 7, END, -100, -100]}, False),
    ],
)
def test_padding_that_is_learned_is_named(row: dict[str, Any], is_named: bool, streaming: bool, tmp_path: Path) -> None:
    found = lines([row, row], tmp_path, streaming=streaming)
    label = "the first training samples" if streaming else "train"
    assert [line.split(";")[0] for line in found] == (
        [f"{label}: 2 of 2 samples learn the padding or end token several times in a row"] if is_named else []
    )


@pytest.mark.parametrize(("end", "number"), [([END, PAD, PAD], 1), ([END, -100, -100], 0), ([END], 0), ([], 0)])
def test_padding_of_an_encoder_decoders_targets_is_counted(end: list[int], number: int) -> None:
    targets = [7, 8, *end]
    ids, labels = np.array([5, 6, END], dtype=np.int32), np.array(targets, dtype=np.int32)
    pairs = Sequences(ids, labels, np.array([0, 3]), np.array([0, len(targets)]), np.array([0]))
    assert num_with_learned_padding(pairs, {PAD, END}) == number
    assert num_with_learned_padding(pairs, set()) == 0
