"""A dataset of your own in ten lines: copy this file, change it, and name it on the command line.

    torchrun ... finetuning.py --dataset my_data.py:get_custom_dataset
    torchrun ... finetuning.py --dataset custom_dataset --custom_dataset.file my_data.py:get_custom_dataset

The function gets the dataset's settings, the tokenizer and the split's name. It returns a list (or a Hugging Face
Dataset) of rows: `input_ids`, and `labels` of the same length with -100 for tokens that do not count in the loss.
"""

from __future__ import annotations

from typing import Any

CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Chile": "Santiago",
}


def get_custom_dataset(dataset_config: Any, tokenizer: Any, split: str) -> list[dict[str, list[int]]]:
    """Questions about capitals; the answers are label tokens, the questions are not."""
    rows = []
    for country, capital in CAPITALS.items():
        prompt = tokenizer.encode(f"What is the capital of {country}?\n", add_special_tokens=False)
        answer = [*tokenizer.encode(capital, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows[:-2] if split == "train" else rows[-2:]
