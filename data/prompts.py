"""Prompts that several datasets share."""

from __future__ import annotations

# The prompts of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), word for word: models trained with them
# expect them.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, input: str = "") -> str:
    """Alpaca's prompt; `input` may be empty."""
    if input:
        return _ALPACA_WITH_INPUT.format(instruction=instruction, input=input)
    return _ALPACA_WITHOUT_INPUT.format(instruction=instruction)
