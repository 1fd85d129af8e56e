"""--mask_prompt False: every token of an example is a label, but for examples whose answer is empty."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.datasets import DataSource
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.sequences.causal import build_sequences
from tests.helpers.chat_templates import FAMILIES

AlpacaDataset = DATASETS["alpaca_dataset"]
GrammarDataset = DATASETS["grammar_dataset"]
InstructionDataset = DATASETS["instruction_dataset"]
SamsumDataset = DATASETS["samsum_dataset"]
ALPACA = {"instruction": "Add", "input": "1, 2", "output": "3", "history": [["Hi", "Yes."]]}
ROWS: dict[str, tuple[DataSource, dict[str, Any], str]] = {
    "samsum_dataset": (SamsumDataset(), {"dialogue": "A: Hi", "summary": "A greets."}, "summary"),
    "alpaca_dataset": (AlpacaDataset(validation_fraction=0), ALPACA, "output"),
    "grammar_dataset": (GrammarDataset(), {"input": "He have.", "target": "He has."}, "target"),
    "instruction_dataset": (InstructionDataset(), {"prompt": "1 + 1 =", "completion": " 2"}, "completion"),
    "as_chat": (InstructionDataset(as_chat=True), {"prompt": "1 + 1 =", "completion": "2"}, "completion"),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_are_learned_where_it_is_asked_for(name: str, streaming: bool, tmp_path: Path) -> None:
    config, row, answer = ROWS[name]
    file, tokenizer = tmp_path / "train.jsonl", FAMILIES["ChatML"].tokenizer()
    file.write_text("".join(json.dumps(each) + "\n" for each in (row, row | {answer: " "})))
    config = replace(config, data_path=str(file), streaming=streaming)
    dataset = name if name in ROWS and name != "as_chat" else "instruction_dataset"

    def sequences(**given: Any) -> Any:
        rows = find_dataset_function(dataset, config)(replace(config, **given), tokenizer, "train")
        return build_sequences(list(rows) if streaming else rows, name=name, context_length=400)

    masked, learned = sequences(), sequences(mask_prompt=False)
    assert masked.input_ids.tolist() == learned.input_ids.tolist()
    assert learned.num_empty_answers == masked.num_empty_answers == 1
    of_row = learned[0]
    assert of_row.labels[1:].tolist() == of_row.input_ids[1:].tolist(), "nothing precedes the first"
    assert (masked[0].labels == -100).sum() > 0
    assert len(learned) == len(masked), "the example without an answer stays as it was"
