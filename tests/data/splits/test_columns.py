"""Columns that mean something: Alpaca's system and history, other columns by name, and names that are not there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.datasets import DataSource
from configs.flags import parse_flags
from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.splits.known_columns import READ_BY
from tests.helpers.chat_templates import FAMILIES
from tests.helpers.refusals import write_lines
from utils.errors import ConfigError

AlpacaDataset = DATASETS["alpaca_dataset"]
GrammarDataset = DATASETS["grammar_dataset"]
InstructionDataset = DATASETS["instruction_dataset"]
SamsumDataset = DATASETS["samsum_dataset"]
FIRST_LINES = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def texts(name: str, config: DataSource, tokenizer: Any) -> list[tuple[str, str]]:
    """The text of each row without start and end token, and its label tokens with | between separate ones."""
    found = []
    for row in find_dataset_function(name, config)(config, tokenizer, "train"):
        learned = "|".join(tokenizer.decode(part) for part in _runs(row["labels"]))
        found.append((tokenizer.decode(row["input_ids"]).removeprefix("<s>").strip().removesuffix("</s>"), learned))
    return found


def _runs(labels: list[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for label in labels:
        if label != -100:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def alpaca(folder: Path, **row: Any) -> AlpacaDataset:
    write_lines(folder / "rows.jsonl", [{"instruction": "Say c.", "output": "c"} | row])
    return AlpacaDataset(str(folder / "rows.jsonl"), validation_fraction=0.0)


@pytest.mark.parametrize("streaming", [False, True])
def test_alpacas_system_takes_the_place_of_the_first_lines(streaming: bool, tokenizer: Any, tmp_path: Path) -> None:
    config = replace(alpaca(tmp_path, system="Be brief.", input="x"), streaming=streaming)
    ((text, learned),) = texts("alpaca_dataset", config, tokenizer)
    assert text == "Be brief.\n\n### Instruction:\nSay c.\n\n### Input:\nx\n\n### Response:\nc"
    assert learned.strip() == "c</s>"


@pytest.mark.parametrize("as_text", [False, True])
def test_alpacas_history_is_earlier_turns_that_are_learned(as_text: bool, tokenizer: Any, tmp_path: Path) -> None:
    history: Any = [["Say a.", "a"], ["Say b.", "b"]]
    config = alpaca(tmp_path, history=json.dumps(history) if as_text else history)
    ((text, learned),) = texts("alpaca_dataset", config, tokenizer)
    asked = [f"### Instruction:\nSay {letter}.\n\n### Response:\n" for letter in "abc"]
    assert text.replace("</s> ", "</s>") == f"{FIRST_LINES}\n\n{asked[0]}a</s>\n\n{asked[1]}b</s>\n\n{asked[2]}c"
    assert learned.replace(" ", "") == "a</s>|b</s>|c</s>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"history": [["Say a."]]}, r"row 1: column history, turn 1: not \[instruction, answer\]"),
        ({"history": "Say a."}, "row 1: column history is no JSON"),
        ({"system": ["Be brief."]}, "row 1: column system is not text but list"),
    ],
)
def test_what_is_no_history_or_system_is_refused(
    row: dict[str, Any], reason: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        texts("alpaca_dataset", alpaca(tmp_path, **row), tokenizer)


@pytest.mark.parametrize(
    ("name", "config", "row", "text"),
    [
        (
            "samsum_dataset",
            SamsumDataset(dialogue_column="article", summary_column="highlights"),
            {"article": "Long.", "highlights": "Short."},
            "Summarize this dialog:\nLong.\n---\nSummary:\nShort.",
        ),
        (
            "alpaca_dataset",
            AlpacaDataset(input_column="context", output_column="response", validation_fraction=0.0),
            {"instruction": "Why?", "context": "It is so.", "response": "So."},
            "### Instruction:\nWhy?\n\n### Input:\nIt is so.\n\n### Response:\nSo.",
        ),
        (
            "instruction_dataset",
            InstructionDataset(input_column="context", completion_column="response"),
            {"instruction": "Why?", "context": "It is so.", "response": "So."},
            "### Instruction:\nWhy?\n\n### Input:\nIt is so.\n\n### Response:\nSo.",
        ),
        (
            "grammar_dataset",
            GrammarDataset(input_column="wrong", target_column="right"),
            {"wrong": "It fall.", "right": "It falls."},
            "It fall.\n---\nCorrected: It falls.",
        ),
    ],
)
def test_columns_by_other_names(
    name: str, config: Any, row: dict[str, str], text: str, tokenizer: Any, tmp_path: Path
) -> None:
    write_lines(tmp_path / "rows.jsonl", [row])
    config = replace(config, data_path=str(tmp_path / "rows.jsonl"))
    ((found, learned),) = texts(name, config, tokenizer)
    assert found.endswith(text)
    assert learned.strip().removesuffix("</s>") == list(row.values())[-1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"output_column": "answer"}, r"has no column answer; it has .*--alpaca_dataset.output_column"),
        ({"input_column": "context"}, r"has no column context; it has .*--alpaca_dataset.input_column"),
    ],
)
def test_a_named_column_that_is_not_there_is_refused(
    settings: dict[str, str], reason: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        texts("alpaca_dataset", replace(alpaca(tmp_path), **settings), tokenizer)


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
VALUES = {
    **dict.fromkeys(("messages", "conversations", "chosen"), TURNS),
    "rejected": [TURNS[0], TURNS[1] | {"content": "Go."}],
    "segments": [{"text": "Hi", "label": True}],
    "input_ids": [1, 2],
}


@pytest.mark.parametrize("columns", READ_BY)
def test_columns_that_another_dataset_reads_are_refused_with_its_name(columns: tuple[str, ...], tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{column: VALUES.get(column, "Hi") for column in columns}] * 2)

    def load(*flags: str) -> Any:
        name = flags[1]
        config = parse_flags(["--model_name", "M", *flags, f"--{name}.data_path", str(tmp_path / "rows.jsonl")])
        settings = config.datasets[name]
        return find_dataset_function(name, settings)(settings, FAMILIES["ChatML"].tokenizer(), "train")

    with pytest.raises(ConfigError, match=r"which --dataset .* reads") as refusal:
        load("--dataset", "text_dataset" if READ_BY[columns].startswith("chat_dataset") else "chat_dataset")
    assert load(*re.search("which (--dataset .*) reads", str(refusal.value))[1].split())


def instruction(folder: Path, row: dict[str, Any], **settings: Any) -> InstructionDataset:
    write_lines(folder / "rows.jsonl", [row])
    return InstructionDataset(str(folder / "rows.jsonl"), **settings)


ASKED = {"instruction": "Say c.", "output": "c", "system": "Be brief.", "history": [["Say a.", "a"]]}


def test_an_instructions_system_and_history_are_what_alpacas_are(tokenizer: Any, tmp_path: Path) -> None:
    found = texts("instruction_dataset", instruction(tmp_path, ASKED), tokenizer)
    assert found == texts("alpaca_dataset", alpaca(tmp_path, **ASKED), tokenizer)
    assert "Be brief." in found[0][0]


def test_an_instructions_system_and_history_are_turns_of_a_chat_by_the_template_that_is_given(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(FAMILIES["ChatML"].template)
    tokenizer = FAMILIES["ChatML"].tokenizer("{{ raise_exception('no') }}")
    settings = {"as_chat": True, "chat_template": str(tmp_path / "chat.jinja")}
    row = ASKED | {"history": [["Say a.", "a"], ["Say b.", " "]]}
    ((text, learned),) = texts("instruction_dataset", instruction(tmp_path, row, **settings), tokenizer)
    turns = [("system", "Be brief."), ("user", "Say a."), ("assistant", "a"), ("user", "Say b."), ("assistant", " ")]
    turns += [("user", "Say c."), ("assistant", "c")]
    assert text == "\n".join(f"<|im_start|>{role}\n{said}<|im_end|>" for role, said in turns)
    assert learned == "a<|im_end|>|c<|im_end|>"
    config = instruction(tmp_path, ASKED, **settings, prompt_template="{system} {prompt}")
    ((text, _),) = texts("instruction_dataset", config, tokenizer)
    assert "<|im_start|>user\nBe brief. Say c.<|im_end|>" in text
    assert "<|im_start|>system\nBe brief." not in text


def test_a_templates_places_are_filled_once_and_what_has_no_place_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    row = {"prompt": "About {input} and {system}: ", "input": "x", "completion": "c", "system": "Be brief."}
    settings = {"input_column": "input", "prompt_template": "{system} {prompt}{input}\\n"}
    ((text, _),) = texts("instruction_dataset", instruction(tmp_path, row, **settings), tokenizer)
    assert text == "Be brief. About {input} and {system}: x\nc"
    for template, lost in (("{prompt}{input}", "system"), ("{prompt}{system}", "input")):
        config = instruction(tmp_path, row, input_column="input", prompt_template=template)
        with pytest.raises(ConfigError, match=rf"row 1: its {lost} would be lost; say where it goes with {{{lost}}}"):
            texts("instruction_dataset", config, tokenizer)
    with pytest.raises(ConfigError, match=r"row 1: its history would be lost; give --instruction_dataset.as_chat"):
        texts("instruction_dataset", instruction(tmp_path, row | {"history": [["a", "b"]]}), tokenizer)


def test_the_input_of_a_question_stands_before_it(tokenizer: Any, tmp_path: Path) -> None:
    row = {"question": "Who?", "context": 5, "answer": "Ann."}
    ((text, _),) = texts("instruction_dataset", instruction(tmp_path, row, input_column="context"), tokenizer)
    assert text == "5\n\nQuestion: Who?\nAnswer:\nAnn."


@pytest.mark.parametrize("name", ["alpaca_dataset", "instruction_dataset"])
@pytest.mark.parametrize("media", [{"images": ["a.png"]}, {"image": "a.png"}, {"audios": ["a.wav"]}])
def test_instructions_about_images_are_refused(
    name: str, media: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    row = {"instruction": "<image>What is it?", "output": "A bee."}
    make = {"alpaca_dataset": alpaca, "instruction_dataset": lambda folder, **row: instruction(folder, row)}[name]
    with pytest.raises(ConfigError, match=f"row 1: column {next(iter(media))} holds what a run on text alone"):
        texts(name, make(tmp_path, **row, **media), tokenizer)
    if "image" in media:  # a column of this name may be about anything
        assert texts(name, make(tmp_path, **media, instruction="What is it?", output="A bee."), tokenizer)
