"""Which dataset reads a file, by the names of its columns: what to give if the chosen one does not read it."""

from __future__ import annotations

from collections.abc import Collection

READ_BY = {
    ("chosen", "rejected"): "chat_dataset --chat_dataset.preference chosen",
    ("messages",): "chat_dataset",
    ("conversations",): "chat_dataset",
    ("instruction", "output"): "alpaca_dataset",
    ("dialogue", "summary"): "samsum_dataset",
    ("prompt", "completion"): "instruction_dataset",
    ("question", "answer"): "instruction_dataset",
    ("input", "target"): "grammar_dataset",
    ("segments",): "segments_dataset",
    ("input_ids",): "custom_dataset",
    ("text",): "text_dataset",
}
"""Datasets by the columns that they read without flags for their names; the first that fits is named."""


def columns_there(columns: Collection[str], dataset: str) -> str:
    """The columns of a file, for messages, and the dataset that reads such, if it is not the chosen one."""
    names = ", ".join(columns) or "none"
    other = next((other for known, other in READ_BY.items() if {*known} <= {*columns}), dataset)
    return names if other.split()[0] == dataset else f"{names}, which --dataset {other} reads"
