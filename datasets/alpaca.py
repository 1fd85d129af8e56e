"""Alpaca: instructions, perhaps an input, and answers (`instruction`, `input`, `output`), as in alpaca_data.json.

python finetuning.py --model_name M --dataset alpaca_dataset --alpaca_dataset.data_path alpaca_data.json

One file has no validation split: 1 % of its rows, always the same ones, are kept out of training and evaluated on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.loss_mask import TextSpan
from data.prompts import alpaca_prompt
from data.splits import load_split
from data.tokenizing import tokenize_split

HUB_NAME = "tatsu-lab/alpaca"


def get_alpaca_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised rows (`input_ids`, `labels`); Alpaca's prompt is not learned, the answer and its end token are."""
    examples = load_split(
        "alpaca_dataset",
        dataset_config,
        split,
        split_slice,
        text_columns=("instruction", "output"),
        other_columns=("input",),
        hub_name=HUB_NAME,
    )
    return tokenize_split(examples, tokenizer, to_spans)


def to_spans(example: Mapping[str, Any]) -> list[TextSpan]:
    return [
        TextSpan(alpaca_prompt(example["instruction"], example.get("input") or ""), False),
        TextSpan(example["output"], True),
    ]
