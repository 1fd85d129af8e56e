"""Prompts that several datasets share."""

from __future__ import annotations

from collections.abc import Sequence

from data.tokens.spans import TextSpan

# The prompts of Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca), word for word: models trained with them
# expect them.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)


def alpaca_spans(
    instruction: str,
    input: str,
    answer: str,
    *,
    system: str,
    history: Sequence[tuple[str, str]],
    end: str,
    learns_empty_answers: bool,
) -> list[TextSpan]:
    """An example in Alpaca's form; `input` may be empty. `system` takes the place of the prompt's first lines.

    Args:
        history: earlier instructions and answers, which are learned, too.
        end: the end token, for the answers of the history.
    """
    if not history:
        return [TextSpan(_first_lines(system, input) + _turn(instruction, input), False), TextSpan(answer, True)]
    spans = [TextSpan(_first_lines(system, ""), False)]
    for question, earlier_answer in history:
        spans.append(TextSpan(_turn(question, ""), False))
        if earlier_answer.strip() or learns_empty_answers:
            spans.append(TextSpan(earlier_answer + end, True))
        else:  # counted later, as any empty answer
            spans += [TextSpan(earlier_answer, True), TextSpan(end, False)]
        spans.append(TextSpan("\n\n", False))
    return [*spans, TextSpan(_turn(instruction, input), False), TextSpan(answer, True)]


def _first_lines(system: str, input: str) -> str:
    return f"{system or (_ALPACA_WITH_INPUT if input else _ALPACA_WITHOUT_INPUT)}\n\n"


def _turn(instruction: str, input: str) -> str:
    subject = f"### Input:\n{input}\n\n" if input else ""
    return f"### Instruction:\n{instruction}\n\n{subject}### Response:\n"
