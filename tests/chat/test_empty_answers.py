"""Empty answers are counted and not learned, or learned where asked; map and streamed reading alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.datasets import DataSource
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.sequences.causal import build_sequences
from tests.helpers.chat_templates import FAMILIES

AlpacaDataset = DATASETS["alpaca_dataset"]
ChatDataset = DATASETS["chat_dataset"]
InstructionDataset = DATASETS["instruction_dataset"]
TextDataset = DATASETS["text_dataset"]
QUESTION = {"role": "user", "content": "Hi"}
ROWS: dict[str, tuple[DataSource, list[dict[str, Any]]]] = {
    "chat_dataset": (
        ChatDataset(),
        [{"messages": [QUESTION, {"role": "assistant", "content": answer}]} for answer in ("No.", "", " \n")],
    ),
    "alpaca_dataset": (
        AlpacaDataset(validation_fraction=0),
        [{"instruction": "Hi", "input": "", "output": answer} for answer in ("No.", "", " \n")],
    ),
    "instruction_dataset": (
        InstructionDataset(),
        [{"prompt": "Hi", "completion": answer} for answer in ("No.", "", " \n")],
    ),
    "text_dataset": (TextDataset(), [{"text": text} for text in ("No.", "", " \n")]),
}


def sequences_of(name: str, config: DataSource, *, streaming: bool = False) -> Any:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    config = replace(config, streaming=streaming)
    rows = find_dataset_function(name, config)(config, tokenizer, "train")
    return build_sequences(list(rows) if streaming else rows, name=name, context_length=200)


@pytest.mark.parametrize("name", ROWS)
def test_empty_answers_are_counted_and_not_learned_unless_asked(name: str, tmp_path: Path) -> None:
    config, rows = ROWS[name]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(config, data_path=str(file))
    skipped = sequences_of(name, config)
    assert (len(skipped), skipped.num_empty_answers, skipped.num_without_label) == (1, 2, 2)
    assert "train: 2 empty answers not learned (--learn_empty_answers learns them)" in skipped.describe("train")
    streamed = sequences_of(name, config, streaming=True)
    assert np.array_equal(streamed.labels, skipped.labels)
    assert streamed.num_empty_answers == 2
    learned = sequences_of(name, replace(config, learn_empty_answers=True))
    assert (len(learned), learned.num_empty_answers) == (3, 0)
    assert np.array_equal(learned[0].labels, skipped[0].labels)


def test_an_empty_answer_of_a_history_is_counted_too(tmp_path: Path) -> None:
    row = {"instruction": "Hi", "output": "No.", "history": [["Hi", ""], ["Hi", "Yes."]]}
    (tmp_path / "train.json").write_text(json.dumps([row]))
    config = AlpacaDataset(str(tmp_path / "train.json"), validation_fraction=0)
    skipped = sequences_of("alpaca_dataset", config)
    learned = sequences_of("alpaca_dataset", replace(config, learn_empty_answers=True))
    assert (skipped.num_empty_answers, learned.num_empty_answers) == (1, 0)
    assert learned.num_label_tokens[0] == skipped.num_label_tokens[0] + 1, "the end token of the empty answer"
    assert np.array_equal(learned.input_ids, skipped.input_ids)
