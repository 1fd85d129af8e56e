"""A line on prompts that are not written by the tokenizer's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from configs.flags import parse_flags
from resolving.inputs import template_notes


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("instruction_dataset", "--instruction_dataset.as_chat"),
        ("instruction_dataset --instruction_dataset.as_chat", None),
        ("instruction_dataset --instruction_dataset.prompt_template {prompt}", None),
        (
            "alpaca_dataset --alpaca_dataset.data_path /d/a.json",
            "--dataset instruction_dataset --instruction_dataset.data_path /d/a.json --instruction_dataset.as_chat",
        ),
        ("samsum_dataset", None),
    ],
)
def test_if_the_tokenizer_has_a_template_the_flags_that_use_it_are_named(
    words: str, remedy: str | None, tiny_model: Path
) -> None:
    config = parse_flags(["--model_name", "m", "--dataset", *words.split()])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    assert template_notes(config, tokenizer) == []
    tokenizer.chat_template = "{{ messages }}"
    found = template_notes(config, tokenizer)
    assert len(found) == (remedy is not None)
    assert all(line.endswith(f"has a chat template; {remedy} uses it") for line in found)
