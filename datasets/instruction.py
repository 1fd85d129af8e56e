"""Prompts and completions, in three common pairs of columns or in columns that you name.

python finetuning.py --model_name M --dataset instruction_dataset --instruction_dataset.data_path my_tasks.jsonl

`prompt`/`completion` are joined unchanged, `instruction`/`input`/`output` get Alpaca's prompt, `question`/`answer` the
one below. --instruction_dataset.prompt_template replaces all of these. With --instruction_dataset.as_chat the prompt is
a user's turn in the model's own format, after the turns of `system` and `history` if a row has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from chat.conversation import Conversation
from chat.preference import LABELS, refuse_labels
from chat.samples import chat_samples
from configs.datasets import MASK_PROMPT, DataSource
from configs.setting import setting
from data.prompts import alpaca_spans
from data.splits.optional_columns import MEDIA_COLUMNS, optional_text, read_history, refuse_media
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import BadExample, ChatSamples, TextSpan
from utils.errors import ConfigError

if TYPE_CHECKING:
    from chat.template import ChatTemplate
    from data.splits.examples import SplitExamples

PAIRS = {"prompt": "completion", "instruction": "output", "question": "answer"}
QUESTION = "Question: {prompt}\nAnswer:\n"
_PLACES = re.compile(r"\{(prompt|input|system)\}")


@dataclass(frozen=True)
class InstructionDataset(DataSource):
    """Prompts, and completions as labels (--dataset instruction_dataset)."""

    prompt_column: str | None = setting(None, "column with the prompt; unset: prompt, instruction, or question")
    input_column: str | None = setting(
        None, "column with input to the prompt; unset: input, if the prompt is instruction"
    )
    completion_column: str | None = setting(None, "column with the completion; unset: completion, output, or answer")
    prompt_template: str | None = setting(
        None,
        "text with {prompt} and optionally {input} and {system}, \\n for a new line; unset: depends on the prompt's "
        "column",
    )
    system_column: str = setting("system", "column with the system's text, if there is")
    history_column: str = setting("history", "column with earlier turns, pairs of prompt and completion, if there is")
    as_chat: bool = setting(False, "write prompt and completion as a question and its answer, by the chat template")
    mask_prompt: bool = setting(True, MASK_PROMPT)
    chat_template: str | None = setting(
        None, "file with a Jinja chat template for as_chat; unset: the tokenizer's own", is_path=True
    )

    @property
    def adds_start_token(self) -> bool:
        return not self.as_chat

    @property
    def flags_of_template(self) -> str | None:
        return None if self.as_chat or self.prompt_template else "--instruction_dataset.as_chat"

    def check(self, flag: str) -> None:
        if self.chat_template is not None and not self.as_chat:
            raise ConfigError(f"{flag}.chat_template: only {flag}.as_chat uses it; add that, or leave this out")


@dataclass(frozen=True)
class Columns:
    """The columns that a file has."""

    prompt: str
    about: str | None  # the prompt's input
    answer: str
    system: str | None
    history: str | None


def get_instruction_dataset(
    dataset_config: InstructionDataset,
    tokenizer: Any,
    split: str,
    split_slice: str | None = None,
    encode: Encode = ONE_TEXT,
) -> Any:
    """Tokenized examples; the completion and its end token are label tokens, the prompt is not."""
    from chat.template import ChatTemplate, use_template
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    config = dataset_config
    if config.prompt_template is not None and "{prompt}" not in config.prompt_template:
        raise ConfigError(
            f"--instruction_dataset.prompt_template: {config.prompt_template!r} has no {{prompt}}; say where it goes"
        )
    asked = (config.prompt_column, config.input_column, config.completion_column)
    more = (config.system_column, config.history_column, *LABELS, *MEDIA_COLUMNS)
    known = (*PAIRS, *PAIRS.values(), "input", *more)
    others = (*known, *(name for name in asked if name))
    examples = load_split("instruction_dataset", config, split, split_slice, other_columns=others)
    columns = _columns(examples, config)
    examples = examples.with_columns(columns.prompt, columns.about, columns.answer, *more)
    examples = replace(examples, text_columns=(columns.prompt, columns.answer))
    options: dict[str, Any] = {"columns": columns, "config": config}
    if not config.as_chat:
        # An encoder reads earlier answers as text; an end token in it would be a source's end.
        end = tokenizer.eos_token if encode.is_one_text else ""
        return tokenize_split(examples, tokenizer, partial(to_spans, **options, end=end), encode=encode)
    use_template(tokenizer, config.chat_template, "--instruction_dataset.chat_template")
    options["chat"] = ChatTemplate.of(
        tokenizer, "--instruction_dataset.chat_template", split_special_tokens=config.split_special_tokens
    )
    return tokenize_split(examples, tokenizer, partial(to_samples, **options), by_template=True, encode=encode)


def _columns(examples: SplitExamples, config: InstructionDataset) -> Columns:
    """The columns to read, of those that are there.

    Raises:
        ConfigError: if one is missing.
    """
    there = examples.columns
    named = config.completion_column
    pairs = [name for name, answer in PAIRS.items() if name in there and (named or answer) in there]
    prompt = config.prompt_column or next(iter(pairs), "prompt")
    answer = named or PAIRS.get(prompt, "completion")
    has_input = prompt == "instruction" and "input" in (*there, *examples.later_columns)
    about = config.input_column or ("input" if has_input else None)
    missing = [name for name in (prompt, answer, config.input_column) if name and name not in there]
    if missing:
        raise ConfigError(
            f"{examples.name} has no column {', '.join(missing)}; it has {examples.columns_there}: name them "
            "with --instruction_dataset.prompt_column and .completion_column"
        )
    taken = (prompt, about, answer)
    system, history = (name if name not in taken else None for name in (config.system_column, config.history_column))
    return Columns(prompt, about, answer, system, history)


def to_spans(example: Mapping[str, Any], *, columns: Columns, config: InstructionDataset, end: str) -> list[TextSpan]:
    text, subject, system, history = _read(example, columns)
    answer = example[columns.answer]
    if columns.prompt == "instruction" and config.prompt_template is None:
        empty = config.learn_empty_answers
        return alpaca_spans(text, subject, answer, system=system, history=history, end=end, learns_empty_answers=empty)
    if history:
        raise BadExample("its history would be lost; give --instruction_dataset.as_chat, which writes it as turns")
    template = config.prompt_template
    if template is None and columns.prompt == "question":
        template = "{input}\n\n" + QUESTION if subject else QUESTION
    return [TextSpan(_prompt(template, text, subject, system), False), TextSpan(answer, True)]


def to_samples(
    example: Mapping[str, Any], *, columns: Columns, config: InstructionDataset, chat: ChatTemplate
) -> ChatSamples:
    """The example as a conversation; the last question is as it stands, or as `prompt_template` writes it."""
    text, subject, system, history = _read(example, columns)
    template = config.prompt_template
    messages, is_learned = [], []
    if system.strip() and "{system}" not in (template or ""):
        messages, is_learned, system = [{"role": "system", "content": system}], [False], ""
    # A template's own white space leads to an answer in the same text. That of the row is the data's.
    question = _prompt(template and template.replace("\\n", "\n").strip(), text, subject, system)
    pairs = [*history, (question, example[columns.answer])]
    num_empty = 0
    for question, answer in pairs:
        is_empty = not answer.strip() and not config.learn_empty_answers
        num_empty += is_empty
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        is_learned += [False, not is_empty]
    return chat_samples(Conversation(messages, tuple(is_learned), num_empty_answers=num_empty), chat)


def _read(example: Mapping[str, Any], columns: Columns) -> tuple[str, str, str, list[tuple[str, str]]]:
    """Prompt, input, system and earlier turns of a row.

    Raises:
        BadExample: if one is not what it should be, or the row holds what would be lost.
    """
    refuse_labels(example)
    text, subject = example[columns.prompt], optional_text(example, columns.about)
    refuse_media(example, (text, subject))
    return text, subject, optional_text(example, columns.system), list(read_history(example, columns.history))


def _prompt(template: str | None, text: str, subject: str, system: str) -> str:
    """The text before the completion; without a template the prompt, and its input below it.

    Raises:
        BadExample: if the template has no place for what the row has.
    """
    template = template or ("{prompt}\n\n{input}" if subject else "{prompt}")
    parts = {"prompt": text, "input": subject, "system": system}
    for name, part in parts.items():
        if part.strip() and f"{{{name}}}" not in template:
            chat = ", or give --instruction_dataset.as_chat" if name == "system" else ""
            raise BadExample(
                f"its {name} would be lost; say where it goes with {{{name}}} in "
                f"--instruction_dataset.prompt_template{chat}"
            )
    return _PLACES.sub(lambda place: parts[place[1]], template.replace("\\n", "\n"))
