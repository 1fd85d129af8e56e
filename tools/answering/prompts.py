"""Prompts, from the command line and from files: texts, or the turns of a chat's row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chat.conversation import TURN_COLUMNS, ChatSettings, Conversation, columns_to_read, read_conversation
from chat.prompt import without_last_answer
from data.files.json_files import json_rows
from data.tokens.spans import BadExample
from utils.errors import ConfigError
from utils.small_files import read_text

_JSON = (".jsonl", ".json")


class Prompt(NamedTuple):
    """What is asked: a text, or the turns of a row, which only a chat template can write."""

    shown: str  # to the user, above its answer
    turns: Conversation | None = None


def read_prompts(file: Path, settings: ChatSettings, chat_template: Any = "") -> list[Prompt]:
    """The prompts of a file: one per line; of JSON rows their "prompt", or their turns up to the last answer.

    Empty lines are skipped.

    Args:
        settings: how the turns of a row are found.
        chat_template: of the tokenizer; a developer's turn stays one if it knows the role.

    Raises:
        ConfigError: if the file cannot be read, holds none, or a row has none.
    """
    file = file.expanduser()
    try:
        text = read_text(file, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts: {file} cannot be read ({error}); name a text file") from error
    if file.suffix not in _JSON:
        prompts = [Prompt(line) for line in text.split("\n") if line.strip()]
    else:
        prompts = [
            _of_row(f"{file}, row {number}", row.value, settings, chat_template)
            if row.value is not None
            else _refuse(row.problem or "")
            for number, row in enumerate(json_rows(file, ("train", "validation", "test")), 1)
        ]
    if not prompts:
        raise ConfigError(f"--prompts: {file} holds no prompt; write one per line")
    for prompt in prompts:
        if prompt.turns is None:
            check_text(prompt.shown)
    return prompts


def check_text(prompt: str, flag: str = "--prompt") -> None:
    """Refuse a prompt that no tokenizer takes.

    Args:
        flag: that gave it.

    Raises:
        ConfigError: if the prompt is empty, or is not valid text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{flag}: {prompt[:40]!a} is not text (no UTF-8 at character {error.start}); give it as UTF-8"
        ) from error
    if not prompt.strip():
        raise ConfigError(f"{flag}: a prompt is empty; give a text")


def _refuse(problem: str) -> Prompt:
    raise ConfigError(f'--prompts: {problem}; give {{"prompt": "..."}} or {{"messages": [...]}} in each row')


def _of_row(where: str, row: Mapping[str, Any], settings: ChatSettings, chat_template: Any) -> Prompt:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return Prompt(prompt)
    columns = {name: row[name] for name in columns_to_read(settings) if name in row}
    if isinstance(prompt, list) and "completion" not in row:  # as TRL writes a prompt of turns
        columns = {**columns, settings.messages_column or TURN_COLUMNS[0]: prompt}
    elif prompt is not None and not isinstance(prompt, list):
        return _refuse(f'{where}: "prompt" is not text')
    elif not columns:
        return _refuse(f'{where} has neither "prompt" nor {" or ".join(map(repr, TURN_COLUMNS))}')
    try:
        turns = read_conversation(columns, settings, chat_template=chat_template, needs_answer=False)
    except BadExample as error:
        return _refuse(f"{where}: {error}")
    turns = without_last_answer(turns)
    if not turns.messages:
        return _refuse(f"{where} has no turn before its answer")
    said = turns.messages[-1]["content"]
    return Prompt(said if isinstance(said, str) else "", turns)
