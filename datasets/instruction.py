"""Prompts and completions, in three common pairs of columns or in columns that you name.

python finetuning.py --model_name M --dataset instruction_dataset --instruction_dataset.data_path my_tasks.jsonl

`prompt`/`completion` are joined unchanged, `instruction`/`input`/`output` get Alpaca's prompt, `question`/`answer` the
one below. --instruction_dataset.prompt_template replaces all of these. With --instruction_dataset.as_chat the prompt is
a user's turn in the model's own format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from data.chat import chat_samples
from data.chat_template import ChatTemplate
from data.conversation import Conversation
from data.loss_mask import ChatSamples, TextSpan
from data.preference import LABELS, refuse_labels
from data.prompts import alpaca_prompt
from data.splits import load_split
from data.tokenizing import tokenize_split
from utils.errors import ConfigError

PAIRS = {"prompt": "completion", "instruction": "output", "question": "answer"}
TEMPLATES = {"question": "Question: {prompt}\nAnswer:\n"}


def get_instruction_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised examples; the completion and its end token are label tokens, the prompt is not."""
    asked = (dataset_config.prompt_column, dataset_config.input_column, dataset_config.completion_column)
    template = dataset_config.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ConfigError(f"--instruction_dataset.prompt_template: {template!r} has no {{prompt}}; say where it goes")
    known = (*PAIRS, *PAIRS.values(), "input")
    examples = load_split(
        "instruction_dataset",
        dataset_config,
        split,
        split_slice,
        other_columns=(*known, *LABELS, *(name for name in asked if name)),
    )
    there = examples.columns
    pairs = [name for name, answer in PAIRS.items() if name in there and (asked[2] or answer) in there]
    prompt = asked[0] or next(iter(pairs), "prompt")
    answer = asked[2] or PAIRS.get(prompt, "completion")
    about = asked[1] or ("input" if prompt == "instruction" and "input" in (*there, *examples.later_columns) else None)
    missing = [name for name in (prompt, answer, asked[1]) if name and name not in there]
    if missing:
        raise ConfigError(
            f"{examples.name} has no column {', '.join(missing)}; it has {', '.join(examples.all_columns)}: name them "
            "with --instruction_dataset.prompt_column and .completion_column"
        )
    columns: dict[str, Any] = {"prompt": prompt, "about": about, "answer": answer, "template": template}
    examples = replace(examples.with_columns(prompt, about, answer, *LABELS), text_columns=(prompt, answer))
    if not dataset_config.as_chat:
        return tokenize_split(examples, tokenizer, partial(to_spans, **columns))
    if not tokenizer.chat_template:
        raise ConfigError(
            "--instruction_dataset.as_chat: the tokenizer has no chat template; take a model that has one, or "
            "leave this out"
        )
    columns |= {"chat": ChatTemplate.of(tokenizer), "learns_empty_answers": examples.learns_empty_answers}
    return tokenize_split(examples, tokenizer, partial(to_samples, **columns), by_template=True)


def to_spans(
    example: Mapping[str, Any], *, prompt: str, about: str | None, answer: str, template: str | None
) -> list[TextSpan]:
    refuse_labels(example)
    text, subject = example[prompt], (example.get(about) or "") if about else ""
    template = template.replace("\\n", "\n") if template is not None else TEMPLATES.get(prompt)
    if template is not None:
        before = template.replace("{prompt}", text).replace("{input}", subject)
    elif prompt == "instruction":
        before = alpaca_prompt(text, subject)
    else:
        before = f"{text}\n\n{subject}" if subject else text
    return [TextSpan(before, False), TextSpan(example[answer], True)]


def to_samples(
    example: Mapping[str, Any],
    *,
    prompt: str,
    about: str | None,
    answer: str,
    template: str | None,
    chat: ChatTemplate,
    learns_empty_answers: bool,
) -> ChatSamples:
    """The example as a conversation of two turns; the prompt is as it stands, or as `template` writes it."""
    spans = to_spans(example, prompt=prompt, about=about, answer=answer, template=template or "{prompt}\n\n{input}")
    question, completion = (span.text.strip() for span in spans)
    is_learned = learns_empty_answers or bool(completion)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
    return chat_samples(Conversation(messages, (False, is_learned), num_empty_answers=int(not is_learned)), chat)
