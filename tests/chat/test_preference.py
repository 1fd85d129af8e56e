"""Preference data is refused, or its good answers are learned and no other, in the forms of TRL and LLaMA-Factory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat.conversation import read_conversation
from chat.preference import REJECTED
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.sequences.causal import build_sequences
from data.tokens.spans import BadExample
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError

AlpacaDataset = DATASETS["alpaca_dataset"]
ChatDataset = DATASETS["chat_dataset"]
InstructionDataset = DATASETS["instruction_dataset"]
QUESTION, GOOD, BAD = (
    {"role": "user", "content": "Sky?"},
    {"role": "assistant", "content": "Blue."},
    {"role": "assistant", "content": "Green."},
)
HISTORY = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, QUESTION]
SHAREGPT = [{"from": "human", "value": "Sky?"}]

RANKED: dict[str, dict[str, Any]] = {
    "TRL, texts": {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Green."},
    "TRL, turns": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, turns as JSON": {
        "prompt": json.dumps([QUESTION]),
        "chosen": json.dumps([GOOD]),
        "rejected": json.dumps([BAD]),
    },
    "TRL, whole conversations": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "UltraFeedback": {"prompt": "Sky?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD], "messages": None},
    "LLaMA-Factory": {
        "conversations": SHAREGPT,
        "chosen": {"from": "gpt", "value": "Blue."},
        "rejected": {"from": "gpt", "value": "Green."},
    },
    "LLaMA-Factory's newer": {"chosen_messages": [QUESTION, GOOD], "rejected_messages": [QUESTION, BAD]},
    "LLaMA-Factory, Alpaca": {"instruction": "Sky?", "input": "", "chosen": "Blue.", "rejected": "Green."},
    "orca": {"question": "Sky?", "chosen": "Blue.", "rejected": "Green."},
}
LABELLED: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": {"messages": [QUESTION, GOOD], "label": True},
    "LLaMA-Factory, ShareGPT": {"conversations": [*SHAREGPT, {"from": "gpt", "value": "Blue."}], "kto_tag": True},
    "TRL, texts": {"prompt": "Sky?", "completion": "Blue.", "label": True},
    "TRL, turns": {"prompt": [QUESTION], "completion": [GOOD], "label": True},
}


@pytest.mark.parametrize("row", [*RANKED.values(), *LABELLED.values()])
def test_preference_data_is_refused_unless_asked_for(row: dict[str, Any]) -> None:
    with pytest.raises(BadExample, match=r"preference data.*--chat_dataset.preference chosen"):
        read_conversation(row, ChatDataset())


@pytest.mark.parametrize("row", [*RANKED.values(), *LABELLED.values()])
def test_the_good_side_is_learned_where_asked(row: dict[str, Any]) -> None:
    found = read_conversation(row, ChatDataset(preference="chosen"))
    assert found.messages == [QUESTION, GOOD]
    assert found.has_loss == (False, True)


@pytest.mark.parametrize("row", LABELLED.values())
def test_of_labelled_rows_the_bad_are_not_learned(row: dict[str, Any]) -> None:
    bad = {name: False if value is True else value for name, value in row.items()}
    assert read_conversation(bad, ChatDataset(preference="chosen")).has_loss == (False, False)


@pytest.mark.parametrize("row", RANKED.values(), ids=RANKED)
def test_a_tie_prefers_neither_side(row: dict[str, Any]) -> None:
    sides = [name for name in row if name in REJECTED]
    tie = row | {REJECTED[side]: row[side] for side in sides}
    found = read_conversation(tie, ChatDataset(preference="chosen"))
    assert (found.messages, found.has_loss) == ([QUESTION, GOOD], (False, False))


def test_a_file_of_ranked_rows_gives_those_that_are_no_ties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "Sky?", "chosen": "Blue.", "rejected": other} for other in ("Green.", "Blue.", "Blue. ")]
    (tmp_path / "dpo.json").write_text(json.dumps(rows))
    config = ChatDataset(str(tmp_path / "dpo.json"), preference="chosen")
    tokens = find_dataset_function("chat_dataset", config)(config, FAMILIES["ChatML"].tokenizer(), "train")
    sequences = build_sequences(tokens, name="chat", context_length=200)
    assert [sequence.source_row for sequence in sequences] == [0]
    assert "train: 2 samples left out: no label token (within context_length)" in sequences.describe("train")
    assert "rows whose two answers are the same are left out" in capsys.readouterr().out


def test_of_answers_of_several_turns_only_what_differs_is_learned() -> None:
    row = {"prompt": "Hi", "chosen": [*HISTORY[1:], GOOD], "rejected": [*HISTORY[1:], BAD]}
    found = read_conversation(row, ChatDataset(preference="chosen"))
    assert (found.messages, found.has_loss) == ([*HISTORY, GOOD], (False, False, False, True))


def test_of_whole_conversations_only_what_differs_is_learned() -> None:
    row = {"chosen": [*HISTORY, GOOD], "rejected": [*HISTORY, BAD]}
    assert read_conversation(row, ChatDataset(preference="chosen")).has_loss == (False, False, False, True)


def test_turns_that_are_named_are_learned_beside_their_rankings() -> None:
    row = RANKED["TRL, whole conversations"] | {"messages": [QUESTION, GOOD]}
    assert read_conversation(row, ChatDataset(messages_column="messages")).has_loss == (False, True)


def test_rows_that_rank_nothing_are_refused_where_a_side_is_asked_for() -> None:
    with pytest.raises(BadExample, match=r"says which answer is good; leave --chat_dataset.preference out"):
        read_conversation({"messages": [QUESTION, GOOD]}, ChatDataset(preference="chosen"))
    with pytest.raises(BadExample, match="its answer has no prompt"):
        read_conversation({"chosen": "Blue.", "rejected": "Green."}, ChatDataset(preference="chosen"))


def test_the_input_of_an_instruction_is_part_of_its_prompt() -> None:
    row = {"instruction": "Which colour?", "input": "The sky.", "chosen": "Blue.", "rejected": "Green."}
    found = read_conversation(row, ChatDataset(preference="chosen"))
    assert found.messages == [{"role": "user", "content": "Which colour?\nThe sky."}, GOOD]
    found = read_conversation(row | {"history": [["Sun?", "Hot."]]}, ChatDataset(preference="chosen"))
    assert [message["content"] for message in found.messages[:2]] == ["Sun?", "Hot."]
    assert found.has_loss == (False, False, False, True)


def test_ranked_instructions_are_refused_with_the_flag_that_learns_them(tmp_path: Path) -> None:
    (tmp_path / "dpo.json").write_text(json.dumps([RANKED["LLaMA-Factory, Alpaca"]] * 2))
    config = AlpacaDataset(str(tmp_path / "dpo.json"), validation_fraction=0)
    function = find_dataset_function("alpaca_dataset", config)
    with pytest.raises(ConfigError, match=r"no column output; .*--chat_dataset.preference chosen"):
        function(config, FAMILIES["ChatML"].tokenizer(), "train")


def test_a_label_that_is_a_class_is_none_of_this() -> None:
    row = {"messages": [QUESTION, GOOD], "label": "astronomy"}
    assert read_conversation(row, ChatDataset()).has_loss == (False, True)


def test_a_file_of_labelled_rows_gives_its_good_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [QUESTION, BAD], "label": False}, {"messages": [QUESTION, GOOD], "label": True}]
    file = tmp_path / "kto.json"
    file.write_text(json.dumps(rows))
    tokenizer = FAMILIES["ChatML"].tokenizer()
    function = find_dataset_function("chat_dataset", ChatDataset())
    with pytest.raises(ConfigError, match=r"kto.json, row 1: .*--chat_dataset.preference chosen"):
        function(ChatDataset(str(file)), tokenizer, "train")
    tokens = function(ChatDataset(str(file), preference="chosen"), tokenizer, "train")
    sequences = build_sequences(tokens, name="chat", context_length=200)
    assert sequences.num_without_label == 1
    labels = sequences[0].labels
    assert tokenizer.decode(labels[labels != -100]) == "Blue.<|im_end|>"
    assert "rows that are labelled false are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "config", "row"),
    [
        ("alpaca_dataset", AlpacaDataset, {"instruction": "Sky?", "output": "Green.", "kto_tag": False}),
        ("instruction_dataset", InstructionDataset, {"prompt": "Sky?", "completion": "Green.", "label": False}),
    ],
)
def test_labelled_instructions_are_refused(name: str, config: Any, row: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps([row] * 2))
    settings = config(str(file), validation_fraction=0)
    with pytest.raises(ConfigError, match=r"row 1: it is preference data.*--dataset chat_dataset"):
        find_dataset_function(name, settings)(settings, FAMILIES["ChatML"].tokenizer(), "train")
    file.write_text(json.dumps([{**row, "label": "astronomy", "kto_tag": None}] * 2))
    tokens = find_dataset_function(name, settings)(settings, FAMILIES["ChatML"].tokenizer(), "train")
    assert np.count_nonzero(np.array(tokens[0]["labels"]) != -100)
