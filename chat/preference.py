"""Preference data: answers that are ranked. It is refused, or its good side is learned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from data.splits.optional_columns import optional_text, read_history
from data.tokens.spans import BadExample

LABELS = ("kto_tag", "label")
REJECTED = {
    "chosen": "rejected",
    "chosen_messages": "rejected_messages",  # LLaMA-Factory's newer files
    "chosen_response": "rejected_response",  # Axolotl's
    "preferred_output": "non_preferred_output",  # OpenAI's
}
"""Columns of bad answers by those of good ones."""

PREFERENCE_COLUMNS = (*REJECTED, *REJECTED.values(), *LABELS)
PROMPT_TEXTS = ("prompt", "question", "instruction", "input")
ANSWER_TEXTS = ("completion", "output")  # of labelled rows
BESIDE_PREFERENCES = (*PROMPT_TEXTS, *ANSWER_TEXTS, "history")

ReadList = Callable[[str, Any], Sequence[Any]]

_IS_GOOD = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def refuse_preferences(example: Mapping[str, Any], remedy: str) -> None:
    """Refuse a row of preference data.

    Raises:
        BadExample: if it is one, with what to do.
    """
    found = [name for name in PREFERENCE_COLUMNS if example.get(name) is not None and not _is_topic(example, name)]
    both = bool(REJECTED.keys() & found) and any(name in found for name in REJECTED.values())
    if both or set(LABELS) & set(found):
        raise BadExample(f"it is preference data ({', '.join(found)}), whose bad answers would be learned; {remedy}")


def refuse_labels(example: Mapping[str, Any]) -> None:
    """The same for a dataset that is not of conversations.

    Raises:
        BadExample: if its answer is labelled good or bad.
    """
    labels = {name: example[name] for name in LABELS if name in example}
    refuse_preferences(labels, "keep the good ones, or give --dataset chat_dataset --chat_dataset.preference chosen")


def unfolded(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's preference rows with the turns and tools of their `input` as columns; any other row as it is."""
    asked = example.get("input")
    if "preferred_output" not in example or not isinstance(asked, Mapping):
        return example
    return {name: value for name, value in {**asked, **example}.items() if name != "input"}


def chosen_turns(
    example: Mapping[str, Any], turns: Sequence[Any], read_list: ReadList, is_answer: Callable[[Any], bool]
) -> tuple[Sequence[Any], Sequence[Any], bool]:
    """The good side of a row: the turns before it, those that are learned, and whether they are good.

    They are not if the other side says the same: such a tie prefers neither.

    Args:
        turns: the row's turns, if it has them in addition to its answers.
        read_list: makes turns of a column's value.
        is_answer: whether a turn is the assistant's.

    Raises:
        BadExample: if the row does not say which answer is good.
    """
    column = next((name for name in REJECTED if example.get(name) is not None), None)
    if column is None:
        return _labelled_turns(example, turns, read_list)
    rejected = example.get(REJECTED[column])
    if isinstance(example[column], str) and not _is_json(example[column]):
        is_tie = isinstance(rejected, str) and rejected.strip() == example[column].strip()
        return _prompt(example, turns, read_list), [{"role": "assistant", "content": example[column]}], not is_tie
    chosen = read_list(column, example[column])
    others = read_list(REJECTED[column], rejected) if rejected else []
    num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, others, strict=False))))
    is_tie = num_shared == len(chosen)
    num_shared = min(num_shared, len(chosen) - 1)
    before = _prompt(example, turns, read_list) if is_answer(chosen[0]) else []
    return [*before, *chosen[:num_shared]], chosen[num_shared:], not is_tie


def _labelled_turns(
    example: Mapping[str, Any], turns: Sequence[Any], read_list: ReadList
) -> tuple[Sequence[Any], Sequence[Any], bool]:
    """The same of a row whose one answer is labelled good or bad."""
    label = next((name for name in LABELS if example.get(name) is not None), None)
    if label is None:
        raise BadExample(
            f"it has no {', '.join(('chosen', *LABELS))} that says which answer is good; leave "
            "--chat_dataset.preference out"
        )
    if (is_good := _IS_GOOD.get(str(example[label]).lower())) is None:
        raise BadExample(f"its {label} is {example[label]!r}; give true or false")
    answer = next((example[name] for name in ANSWER_TEXTS if example.get(name) is not None), None)
    if not turns and isinstance(answer, str) and not _is_json(answer):
        return _prompt(example, turns, read_list), [{"role": "assistant", "content": answer}], is_good
    return [], turns, is_good


def _prompt(example: Mapping[str, Any], turns: Sequence[Any], read_list: ReadList) -> Sequence[Any]:
    """The turns before an answer that stands by itself."""
    if turns:
        return turns
    column = next((name for name in PROMPT_TEXTS if example.get(name)), None)
    if column is None:
        raise BadExample(
            f"its answer has no prompt; give one in {', '.join(PROMPT_TEXTS)}, messages or conversations, or read "
            "texts that hold it by --dataset preference_dataset --preference_dataset.as_chat False"
        )
    if not isinstance(example[column], str) or _is_json(example[column]):
        return read_list(column, example[column])
    has_more = column != "input"  # as in Alpaca's files
    about = optional_text(example, "input") if has_more else ""
    history = list(read_history(example, "history")) if has_more else []
    earlier = [text for pair in history for text in pair]
    questions = [*earlier, f"{example[column]}\n{about}" if about else example[column]]
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(questions)]


def _is_json(text: str) -> bool:
    """Whether a text is the JSON of turns, also if that is broken; an answer may be JSON of something else."""
    if re.match(r"\s*(\[\s*)?\{", text) is None:
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return re.match(r"""\s*(\[\s*)?\{\s*["'](role|from|content|value)["']""", text) is not None
    turns = value if isinstance(value, list) else [value]
    return all(
        isinstance(turn, Mapping)
        and turn.keys() & {"role", "from"}
        and turn.keys() & {"content", "value", "tool_calls"}
        for turn in turns
    )


def _is_topic(example: Mapping[str, Any], name: str) -> bool:
    """Whether a column `label` says something else, such as a class."""
    value = example[name]
    return name == "label" and not isinstance(value, bool) and str(value).lower() not in ("true", "false")
