"""A conversation that gives several samples stays one example: for counts, slices, messages, map and stream alike."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from configs.formats import DATASETS
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import load_sequences
from data.sequences.causal import build_sequences
from data.sequences.flattening import flatten
from data.streaming.sources import StreamSource
from tests.helpers.chat_templates import REWRITING
from utils.errors import ConfigError

ChatDataset = DATASETS["chat_dataset"]
InstructionDataset = DATASETS["instruction_dataset"]
# Rows of one, two and one answers.
ROWS = [["Hi", "Hello."], ["Capital of Peru?", "Lima.", "And of Chile?", "Santiago."], ["Bye", "Goodbye."]]
BUILD = partial(build_sequences, context_length=256, truncation="error")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(row)]}
        for row in ROWS
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


def load(file: Path, split_slice: str | None = None, build: Any = BUILD) -> Any:
    config = ChatDataset(data_path=str(file))
    function = find_dataset_function("chat_dataset", config)
    tokenizer = REWRITING["empty thought"].tokenizer()
    return load_sequences(function, config, tokenizer, "train", split_slice=split_slice, build=build)


def test_samples_keep_the_row_of_their_conversation_and_are_counted_by_it(file: Path) -> None:
    sequences = load(file)
    assert sequences.source_rows.tolist() == [0, 1, 1, 2]
    assert (sequences.num_by_prompts, sequences.num_by_turns, sequences.num_by_marks) == (2, 1, 0)
    (line,) = sequences.describe("train")
    assert "2 after its generation prompts; 1 turn by turn, in several samples" in line
    assert load(file).describe("train") == [line], "found in the cache"


def test_a_slice_counts_conversations(file: Path) -> None:
    assert load(file, "2").source_rows.tolist() == [0, 1, 1]


def test_a_refusal_names_the_row_of_the_conversation(file: Path) -> None:
    lengths = load(file).lengths.tolist()
    with pytest.raises(ConfigError, match=r"row 2: \d+ tokens are more"):
        load(file, build=partial(build_sequences, context_length=max(lengths[0], lengths[3]), truncation="error"))


@pytest.mark.parametrize("max_rows", [None, 2])
def test_a_stream_gives_the_same(file: Path, max_rows: int | None) -> None:
    config = ChatDataset(data_path=str(file), streaming=True)
    tokenizer = REWRITING["empty thought"].tokenizer()
    function = find_dataset_function("chat_dataset", config)
    source = StreamSource("chat_dataset", function, config, tokenizer, "train", BUILD, len(tokenizer), max_rows)
    streamed = [sequence for block in source.blocks(0, size=2) for sequence in block]
    whole = list(load(file, None if max_rows is None else str(max_rows)))
    assert [sequence.source_row for sequence in streamed] == [sequence.source_row for sequence in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()


def test_sample_lengths_of_rows_are_read_alike_by_column_and_by_row_and_must_add_up() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "sample_lengths": [1, 2]},
        {"input_ids": [4], "labels": [4], "sample_lengths": [1]},
    ]
    by_row, by_column = flatten(rows, "test", 5), flatten(datasets.Dataset.from_list(rows), "test", 5)
    assert by_row.offsets.tolist() == by_column.offsets.tolist() == [0, 1, 3, 4]
    assert by_row.source_rows.tolist() == by_column.source_rows.tolist() == [5, 5, 6]
    rows[0]["sample_lengths"] = [1, 1]
    for wrong in (rows, datasets.Dataset.from_list(rows)):
        with pytest.raises(ConfigError, match="row 1: sample_lengths add up to 2, and the row has 3 tokens"):
            flatten(wrong, "test")


@pytest.mark.parametrize("template", [None, "Task: {prompt} ({input})"])
def test_instructions_as_a_chat_are_what_the_template_writes(template: str | None, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        '{"instruction": "Name a lake.", "input": "in Peru", "output": "Titicaca."}\n'
    )
    tokenizer = REWRITING["empty thought"].tokenizer()
    config = InstructionDataset(data_path=str(tmp_path / "tasks.jsonl"), as_chat=True, prompt_template=template)
    (row,) = find_dataset_function("instruction_dataset", config)(config, tokenizer, "train")
    question = "Name a lake.\n\nin Peru" if template is None else "Task: Name a lake. (in Peru)"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "Titicaca."}]
    assert row["input_ids"] == tokenizer.apply_chat_template(turns, return_dict=False)
    learned = tokenizer.decode([label for label in row["labels"] if label != -100])
    assert learned == "<think>\n\n</think>\n\nTiticaca.<|im_end|>"
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"--instruction_dataset\.chat_template: the tokenizer has no chat template"):
        find_dataset_function("instruction_dataset", config)(config, tokenizer, "train")
