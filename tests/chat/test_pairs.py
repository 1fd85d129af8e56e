"""Rows of preference data become two conversations, or two texts, that follow one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.sequences.pairs import build_pairs
from tests.helpers.processes import ROOT
from utils.errors import ConfigError

USER, OTHER = {"role": "user", "content": "Where?"}, {"role": "user", "content": "When?"}
GOOD, BAD = {"role": "assistant", "content": "Here."}, {"role": "assistant", "content": "No."}
ASKED = "<|user|>\nWhere?</s> \n<|assistant|>\n"
TURNS = [(f"{ASKED}Here.</s> \n", "Here.</s>"), (f"{ASKED}No.</s> \n", "No.</s>")]


@pytest.fixture
def read(tiny_model: Path, tmp_path: Path) -> Any:
    def read(row: dict[str, Any], **settings: Any) -> list[tuple[str, str]]:
        """The text of both answers with their prompt, and what is learned of it."""
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        if settings.get("as_chat", True):
            settings["chat_template"] = str(ROOT / "datasets/samples/formats/chat.jinja")
        config = DATASETS["preference_dataset"](data_path=str(tmp_path / "rows.jsonl"), **settings)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        rows = find_dataset_function("preference_dataset", config)(config, tokenizer, "train")
        pairs = build_pairs(rows, name="x", context_length=256)
        return [
            (tokenizer.decode(text.input_ids), tokenizer.decode(text.labels[text.labels >= 0]))
            for text in pairs[0].texts
        ]

    return read


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Where?", "chosen": "Here.", "rejected": "No."},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Where?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"conversations": [{"from": "human", "value": "Where?"}]}
        | {"chosen": {"from": "gpt", "value": "Here."}, "rejected": {"from": "gpt", "value": "No."}},
        {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        {"instruction": "Where?", "input": "", "chosen": "Here.", "rejected": "No."},
        {"messages": [USER], "chosen_messages": [GOOD], "rejected_messages": [BAD]},
    ],
    ids=lambda row: "-".join(row),
)
def test_every_form_of_a_pair_is_read_alike(row: dict[str, Any], read: Any) -> None:
    assert read(row) == TURNS


def test_earlier_answers_are_a_part_of_the_prompt(read: Any) -> None:
    before = [OTHER, {"role": "assistant", "content": "Now."}, USER]
    (chosen, learned), (rejected, bad) = read({"chosen": [*before, GOOD], "rejected": [*before, BAD]})
    assert (learned, bad) == ("Here.</s>", "No.</s>")
    assert chosen.removesuffix("Here.</s> \n") == rejected.removesuffix("No.</s> \n")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
            [("<s> 2 + 2 = 4</s>", "4</s>"), ("<s> 2 + 2 = 5</s>", "5</s>")],
        ),
        (
            {"chosen": "Q: a A: yes", "rejected": "Q: a A: no"},
            [("<s> Q: a A: yes</s>", "yes</s>"), ("<s> Q: a A: no</s>", "no</s>")],
        ),
    ],
    ids=["prompt", "shared"],
)
def test_texts_are_joined_as_they_are_if_that_is_asked_for(
    row: dict[str, Any], wanted: list[tuple[str, str]], read: Any
) -> None:
    assert [(text, learned.strip()) for text, learned in read(row, as_chat=False)] == wanted


def test_a_special_token_that_an_answer_spells_stays_text(read: Any) -> None:
    (chosen, _), _ = read({"prompt": "Where?", "chosen": "</s>", "rejected": "No."}, as_chat=False)
    assert chosen.count("</s>") == 2  # spelled, and the token that ends the text


@pytest.mark.parametrize(
    ("row", "refusal"),
    [
        (
            {"chosen": [USER, GOOD], "rejected": [OTHER, BAD]},
            "row 1: its answers have different prompts, from turn 1 on",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "row 1: it has no rejected; a pair has a chosen and a"),
        (
            {"prompt": "a", "completion": "b", "label": True, "chosen": None, "rejected": None},
            "as for KTO, which is not",
        ),
        (
            {"messages": [USER, GOOD]},
            "has no columns chosen and rejected; it has messages, which --dataset chat_dataset",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "none of its 1 row has two different answers"),
    ],
    ids=["prompts", "rejected", "kto", "columns", "tie"],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], refusal: str, read: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        read(row)
    assert refusal in str(refused.value)


def test_turns_without_a_template_are_refused(read: Any) -> None:
    with pytest.raises(ConfigError, match="column chosen is not text but list; conversations are written by the chat"):
        read({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, as_chat=False)
