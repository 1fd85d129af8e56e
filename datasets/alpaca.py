"""Alpaca: instructions, optional inputs, and answers (`instruction`, `input`, `output`), as in alpaca_data.json.

python finetuning.py --model_name M --dataset alpaca_dataset --alpaca_dataset.data_path alpaca_data.json

The file has no validation split, so 1 % of its rows, always the same ones, are evaluated on and not trained on. As in
LLaMA-Factory, `system` takes the place of the prompt's first lines, and the answers of `history` are learned, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from configs.datasets import AlpacaDataset
from data.loss_mask import BadExample, TextSpan
from data.preference import LABELS, refuse_labels
from data.prompts import alpaca_prompt, alpaca_turn
from data.splits import load_split
from data.tokenizing import tokenize_split

HUB_NAME = "tatsu-lab/alpaca"


def get_alpaca_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised examples (`input_ids`, `labels`); answers and their end tokens are label tokens, prompts are not."""
    config = dataset_config
    examples = load_split(
        "alpaca_dataset",
        config,
        split,
        split_slice,
        text_columns=(config.instruction_column, config.output_column),
        other_columns=(config.input_column, config.system_column, config.history_column, *LABELS),
        hub_name=HUB_NAME,
    )
    return tokenize_split(examples, tokenizer, partial(to_spans, config=config, end=tokenizer.eos_token))


def to_spans(example: Mapping[str, Any], *, config: AlpacaDataset, end: str) -> list[TextSpan]:
    refuse_labels(example)
    instruction, answer = example[config.instruction_column], example[config.output_column]
    subject, system = (_optional_text(example, name) for name in (config.input_column, config.system_column))
    turns = list(_read_history(config.history_column, example.get(config.history_column)))
    if not turns:
        return [TextSpan(alpaca_prompt(instruction, subject, system), False), TextSpan(answer, True)]
    spans = []
    for number, (question, earlier_answer) in enumerate(turns):
        prompt = alpaca_prompt(question, "", system) if number == 0 else alpaca_turn(question)
        is_empty = not earlier_answer.strip() and not config.learn_empty_answers
        answered = (
            [TextSpan(earlier_answer, True), TextSpan(end, False)]
            if is_empty
            else [TextSpan(earlier_answer + end, True)]
        )
        spans += [TextSpan(prompt, False), *answered, TextSpan("\n\n", False)]  # an empty answer is counted later
    return [*spans, TextSpan(alpaca_turn(instruction, subject), False), TextSpan(answer, True)]


def _optional_text(example: Mapping[str, Any], name: str) -> str:
    value = example.get(name)
    if value is not None and not isinstance(value, str | int | float):
        raise BadExample(f"column {name} is not text but {type(value).__name__}")
    return "" if value is None else str(value)


def _read_history(name: str, history: Any) -> Iterator[tuple[str, str]]:
    if isinstance(history, str) and history.strip():
        try:
            history = json.loads(history)
        except ValueError as error:
            raise BadExample(f"column {name} is no JSON ({error})") from error
    for number, turn in enumerate(history or [], 1):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise BadExample(f"column {name}, turn {number}: not [instruction, answer], two texts")
        yield turn[0], turn[1]
