"""Prompts and completions, in the three ways people name them, or in columns that you name.

python finetuning.py --model_name M --dataset instruction_dataset --instruction_dataset.data_path my_tasks.jsonl

`prompt`/`completion` are taken as they are, `instruction`/`input`/`output` get Alpaca's prompt, `question`/`answer` the
one below; --instruction_dataset.prompt_template writes it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from data.files import load_split
from data.loss_mask import Piece
from data.prompts import alpaca_prompt
from data.tokenizing import tokenize_rows
from utils.errors import ConfigError

PAIRS = {"prompt": "completion", "instruction": "output", "question": "answer"}
TEMPLATES = {"question": "Question: {prompt}\nAnswer:\n"}


def get_instruction_dataset(dataset_config: Any, tokenizer: Any, split: str) -> Any:
    """Tokenised rows (`input_ids`, `labels`); the prompt is not learned, the completion and its end token are."""
    asked = (dataset_config.prompt_column, dataset_config.input_column, dataset_config.completion_column)
    template = dataset_config.prompt_template
    if template is not None and "{prompt}" not in template:
        raise ConfigError(f"--instruction_dataset.prompt_template: {template!r} has no {{prompt}}; say where it goes")
    known = (*PAIRS, *PAIRS.values(), "input")
    source = load_split(
        "instruction_dataset", dataset_config, split, other_columns=(*known, *(name for name in asked if name))
    )
    there = source.columns
    prompt = asked[0] or next((name for name, answer in PAIRS.items() if name in there and answer in there), "prompt")
    answer = asked[2] or PAIRS.get(prompt, "completion")
    about = asked[1] or ("input" if prompt == "instruction" and "input" in there else None)
    missing = [name for name in (prompt, answer, about) if name and name not in there]
    if missing:
        raise ConfigError(
            f"{source.name} has no column {', '.join(missing)}; it has {', '.join(source.all_columns)}: name them with "
            "--instruction_dataset.prompt_column and .completion_column"
        )
    columns = {"prompt": prompt, "about": about, "answer": answer, "template": template}
    source = replace(source, text_columns=(prompt, answer))  # known by now; tokenize_rows sees to it that they are text
    return tokenize_rows(source, tokenizer, partial(to_pieces, **columns))


def to_pieces(
    row: Mapping[str, Any], *, prompt: str, about: str | None, answer: str, template: str | None
) -> list[Piece]:
    text, subject = row[prompt], (row[about] or "") if about else ""
    template = template.replace("\\n", "\n") if template is not None else TEMPLATES.get(prompt)
    if template is not None:
        before = template.replace("{prompt}", text).replace("{input}", subject)
    elif prompt == "instruction":
        before = alpaca_prompt(text, subject)
    else:
        before = f"{text}\n\n{subject}" if subject else text
    return [Piece(before, False), Piece(row[answer], True)]
