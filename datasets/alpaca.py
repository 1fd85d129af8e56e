"""Alpaca: instructions, optional inputs, and answers (`instruction`, `input`, `output`), as in alpaca_data.json.

python finetuning.py --model_name M --dataset alpaca_dataset --alpaca_dataset.data_path alpaca_data.json

The file has no validation split, so 1 % of its rows, always the same ones, are evaluated on and not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.loss_mask import TextSpan
from data.preference import LABELS, refuse_labels
from data.prompts import alpaca_prompt
from data.splits import load_split
from data.tokenizing import tokenize_split

HUB_NAME = "tatsu-lab/alpaca"


def get_alpaca_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised examples (`input_ids`, `labels`); the answer and its end token are label tokens, the prompt is not."""
    examples = load_split(
        "alpaca_dataset",
        dataset_config,
        split,
        split_slice,
        text_columns=("instruction", "output"),
        other_columns=("input", *LABELS),
        hub_name=HUB_NAME,
    )
    return tokenize_split(examples, tokenizer, to_spans)


def to_spans(example: Mapping[str, Any]) -> list[TextSpan]:
    refuse_labels(example)
    return [
        TextSpan(alpaca_prompt(example["instruction"], example.get("input") or ""), False),
        TextSpan(example["output"], True),
    ]
