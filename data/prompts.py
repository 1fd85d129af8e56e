"""Prompts that several datasets share."""

from __future__ import annotations

# The prompts of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), word for word: models trained with them
# expect them.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


def alpaca_prompt(instruction: str, input: str = "", system: str = "") -> str:
    """Alpaca's prompt; `input` may be empty. `system` takes the place of its first lines."""
    first_lines = system or (_ALPACA_WITH_INPUT if input else _ALPACA_WITHOUT_INPUT)
    return f"{first_lines}\n\n{alpaca_turn(instruction, input)}"


def alpaca_turn(instruction: str, input: str = "") -> str:
    """What follows the first lines, and an earlier answer."""
    subject = f"### Input:\n{input}\n\n" if input else ""
    return f"### Instruction:\n{instruction}\n\n{subject}### Response:\n"
