"""A user's own dataset function: llama-recipes' published form runs unchanged, with its data collator."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import finetuning
from configs.datasets import CustomDataset
from data.dataset_functions.importing import find_dataset_function
from data.pipeline import load_sequences
from data.sequences.causal import build_sequences
from tests.helpers.processes import ROOT, read_metrics
from utils.errors import ConfigError

BUILD = partial(build_sequences, context_length=64)
COLLATED = """
import torch

def get_custom_dataset(dataset_config, tokenizer, split):
    return [f"Is {number} a number?|Yes." for number in range(8 if split == "train" else 2)]

def get_data_collator(dataset_processer):
    def collate(samples):
        rows = []
        for sample in samples:
            prompt, answer = (dataset_processer.encode(part, add_special_tokens=False) for part in sample.split("|"))
            rows.append((prompt + answer, [-100] * len(prompt) + answer))
        length = max(len(ids) for ids, _ in rows) + 3
        return {
            "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows]),
            EXTRA
        }
    return collate
"""


def run(model: Path, output: Path, file: str) -> list[dict[str, Any]]:
    argv = [
        "--model_name",
        str(model),
        "--output_dir",
        str(output),
        "--dataset",
        "custom_dataset",
        "--save_model",
        "False",
    ]
    argv += [
        "--custom_dataset.file",
        file,
        "--num_workers_dataloader",
        "0",
        "--context_length",
        "64",
        "--num_epochs",
        "1",
    ]
    assert finetuning.main(argv) == 0
    return read_metrics(output)


@pytest.fixture
def collated(tmp_path: Path) -> Any:
    def write(extra: str = "") -> str:
        file = tmp_path / "collated.py"
        file.write_text(COLLATED.replace("EXTRA", extra))
        return str(file)

    return write


def test_llama_recipes_example_runs(tiny_model: Path, tmp_path: Path) -> None:
    events = run(tiny_model, tmp_path / "run", f"{ROOT}/tests/helpers/llama_recipes_dataset.py:get_custom_dataset")
    (start,) = [event for event in events if event["event"] == "start"]
    assert (start["num_train_samples"], start["num_eval_samples"]) == (12, 4)
    assert events[-1]["status"] == "finished"
    assert any(event["event"] == "eval" for event in events)


def test_a_data_collator_makes_each_sequence_and_the_run_uses_it(
    tiny_model: Path, tmp_path: Path, collated: Any
) -> None:
    config = CustomDataset(file=collated())
    function = find_dataset_function("custom_dataset", config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sequences = load_sequences(function, config, tokenizer, "train", split_slice="5", build=BUILD)
    assert len(sequences) == 5
    for number, (ids, labels, _) in enumerate(sequences):
        assert tokenizer.decode(ids).replace(" Yes", "Yes") == f"Is {number} a number?Yes.", "without the padding"
        assert tokenizer.decode(labels[labels != -100]) == "Yes."
    events = run(tiny_model, tmp_path / "run", collated())
    assert events[0]["num_train_samples"] == 8


def test_what_a_collator_returns_beside_text_is_refused(tiny_model: Path, collated: Any) -> None:
    config = CustomDataset(file=collated("'pixel_values': 1"))
    function = find_dataset_function("custom_dataset", config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(ConfigError, match=r"row 1: the collator returned pixel_values"):
        load_sequences(function, config, tokenizer, "train", split_slice=None, build=BUILD)
