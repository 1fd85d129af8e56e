"""Dataset files in the forms of llama-recipes': chat templates that give lists, classes, map-style datasets."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, BatchEncoding

from configs.datasets import CustomDataset
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import load_sequences
from data.sequences.causal import build_sequences
from data.sequences.tokenized import Sequences
from data.streaming.sources import StreamSource
from tests.helpers.chat_templates import FAMILIES
from utils.errors import ConfigError

BUILD = partial(build_sequences, context_length=128)

# As llama-recipes' custom_dataset.py tokenizes for Llama 3: token ids are sliced, copied, counted and searched.
BY_TEMPLATE = """
import copy
import itertools

import datasets

def tokenize_dialog(dialog, tokenizer):
    dialog_tokens = tokenizer.apply_chat_template(dialog)
    dialog_tokens = dialog_tokens[:len(dialog_tokens)]
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    ends = [i for i, n in enumerate(dialog_tokens) if n == end]
    labels = copy.copy(dialog_tokens)
    last = 0
    for n, index in enumerate(ends):
        if n % 2 == 1:
            last = index
        else:
            labels[last : index + 1] = [-100] * (index - last + 1)
    dialog_tokens, labels = [dialog_tokens], [labels]
    combined_tokens = {
        "input_ids": list(itertools.chain(*(t for t in dialog_tokens))),
        "labels": list(itertools.chain(*(t for t in labels))),
    }
    return dict(combined_tokens, attention_mask=[1] * len(combined_tokens["input_ids"]))

def get_custom_dataset(dataset_config, tokenizer, split):
    dialog = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes, it is."}]
    rows = datasets.Dataset.from_list([{"dialog": dialog}] * 3)
    return rows.map(lambda row: tokenize_dialog(row["dialog"], tokenizer), remove_columns=["dialog"])
"""

# As its alpaca_dataset.py and grammar_dataset.py: a class, constructed like a function is called, with items alone.
MAP_STYLE = """
import copy

import torch
from torch.utils.data import Dataset

class InstructionDataset(Dataset):
    def __init__(self, dataset_config, tokenizer, partition="train"):
        if partition not in ("train", "validation"):
            raise ValueError(partition)
        self.ann = [f"Number {n}:" for n in range(6 if partition == "train" else 2)]
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.ann)

    def __getitem__(self, index):
        WRONG
        prompt = torch.tensor(self.tokenizer.encode(self.ann[index % 6]), dtype=torch.int64)
        example = self.tokenizer.encode(self.ann[index % 6] + " yes") + [self.tokenizer.eos_token_id]
        example = torch.tensor(example, dtype=torch.int64)
        labels = copy.deepcopy(example)
        labels[: len(prompt)] = -1
        example_mask = example.ge(0)
        label_mask = labels.ge(0)
        labels[~label_mask] = -100
        return {"input_ids": example.tolist(), "labels": labels.tolist(), "attention_mask": example_mask.tolist()}
"""


@pytest.fixture
def llama_3() -> Any:
    return FAMILIES["Llama-3"].tokenizer()


def find(tmp_path: Path, contents: str, name: str = "get_custom_dataset") -> tuple[Any, CustomDataset]:
    file = tmp_path / "rows.py"
    file.write_text(contents)
    config = CustomDataset(file=f"{file}:{name}")
    return find_dataset_function("custom_dataset", config), config


def load(found: tuple[Any, CustomDataset], tokenizer: Any, split_slice: str | None = None) -> Sequences:
    function, config = found
    return load_sequences(function, config, tokenizer, "train", split_slice=split_slice, build=BUILD)


def test_a_chat_template_gives_a_list_of_token_ids(llama_3: Any, tmp_path: Path) -> None:
    sequences = load(find(tmp_path, BY_TEMPLATE), llama_3)
    assert len(sequences) == 3
    ids, labels, _ = sequences[2]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    question = f"<s>{header.format('user')}Is it?<|eot_id|>"
    answer = f"{header.format('assistant')}Yes, it is.<|eot_id|>"
    assert llama_3.decode(ids) == question + answer
    assert llama_3.decode(labels[labels != -100]) == answer


def test_files_written_for_transformers_5_get_what_they_expect(llama_3: Any, tmp_path: Path) -> None:
    taken: list[Any] = []
    function, _ = find(tmp_path, "def get_custom_dataset(config, tokenizer, split):\n    config.append(tokenizer)\n")
    function(taken, llama_3, "train")
    (tokenizer,) = taken
    assert tokenizer is llama_3, "what the file adds to it must be saved with the model"
    turns = [{"role": "user", "content": "Hi"}]
    plain = type(tokenizer).apply_chat_template(tokenizer, turns)
    tokens = tokenizer.apply_chat_template(turns)
    assert tokens == tokens["input_ids"] == tokens.input_ids == plain["input_ids"]
    assert dict(tokens) == dict(**tokens) == dict(plain)
    assert ("input_ids" in tokens, plain["input_ids"][0] in tokens) == (True, True)
    for copied in (copy.copy(tokens), copy.deepcopy(tokens), pickle.loads(pickle.dumps(tokens)), tokens[:]):
        assert copied == plain["input_ids"]
    assert isinstance(tokenizer.apply_chat_template(turns, return_dict=True), BatchEncoding)
    assert tokenizer.apply_chat_template(turns, return_tensors="pt")["input_ids"].shape[0] == 1
    assert tokenizer.apply_chat_template(turns, tokenize=False).endswith("Hi<|eot_id|>")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(again.apply_chat_template(turns), BatchEncoding)


def test_a_class_may_return_a_map_style_dataset(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    found = find(tmp_path, MAP_STYLE.replace("WRONG", ""), "InstructionDataset")
    sequences = load(found, tokenizer)
    assert len(sequences) == 6
    assert tokenizer.decode(sequences[5].input_ids) == "Number 5: yes</s>"
    assert tokenizer.decode(sequences[5].labels[sequences[5].labels != -100]).strip() == "yes</s>"
    assert len(load(found, tokenizer, split_slice="2")) == 2


def test_a_map_style_dataset_can_be_streamed_and_sent_to_a_worker(tiny_model: Path, tmp_path: Path) -> None:
    function, config = find(tmp_path, MAP_STYLE.replace("WRONG", ""), "InstructionDataset")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    source = StreamSource("custom_dataset", function, config, tokenizer, "train", BUILD, vocab_size=1000)
    whole = load((function, config), tokenizer)
    for streamed in (source, pickle.loads(pickle.dumps(source))):
        (block,) = streamed.blocks(0)
        assert block.input_ids.tolist() == whole.input_ids.tolist()


def test_an_error_in_a_class_is_refused_with_its_line(tiny_model: Path, tmp_path: Path) -> None:
    found = find(tmp_path, MAP_STYLE.replace("WRONG", "raise KeyError('text')"), "InstructionDataset")
    with pytest.raises(ConfigError, match=rf"KeyError: 'text' \({tmp_path}/rows.py:\d+\)"):
        load(found, AutoTokenizer.from_pretrained(tiny_model))
