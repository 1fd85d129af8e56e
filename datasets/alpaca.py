"""Alpaca: instructions, optional inputs, and answers (`instruction`, `input`, `output`), as in alpaca_data.json.

python finetuning.py --model_name M --dataset alpaca_dataset --alpaca_dataset.data_path alpaca_data.json

The file has no validation split, so 1 % of its rows, always the same ones, are evaluated on and not trained on. As in
LLaMA-Factory, `system` takes the place of the prompt's first lines, and the answers of `history` are learned, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from chat.preference import LABELS, refuse_labels
from configs.datasets import FORMS, FRACTION, MASK_PROMPT, DataSource
from configs.setting import setting
from data.prompts import alpaca_spans
from data.splits.optional_columns import MEDIA_COLUMNS, optional_text, read_history, refuse_media
from data.tokens.encoding import ONE_TEXT, Encode
from data.tokens.spans import TextSpan

HUB_NAME = "tatsu-lab/alpaca"


@dataclass(frozen=True)
class AlpacaDataset(DataSource):
    """Instructions and answers, as in alpaca_data.json (--dataset alpaca_dataset)."""

    data_path: str | None = setting(None, f"{FORMS}; unset: tatsu-lab/alpaca from the hub", is_path=True)
    validation_fraction: Literal["auto"] | float = setting(0.01, FRACTION, minimum=0, exclusive_maximum=1)
    instruction_column: str = setting("instruction", "column with the instruction")
    input_column: str = setting("input", "column with input to the instruction; it may be missing")
    output_column: str = setting("output", "column with the answer")
    system_column: str = setting("system", "column with text that takes the place of Alpaca's first lines, if there is")
    history_column: str = setting("history", "column with earlier turns, pairs of instruction and answer, if there is")
    mask_prompt: bool = setting(True, MASK_PROMPT)

    @property
    def flags_of_template(self) -> str | None:
        path = f"--instruction_dataset.data_path {self.data_path or HUB_NAME}"
        return f"--dataset instruction_dataset {path} --instruction_dataset.as_chat"


def get_alpaca_dataset(
    dataset_config: AlpacaDataset, tokenizer: Any, split: str, split_slice: str | None = None, encode: Encode = ONE_TEXT
) -> Any:
    """Tokenized examples (`input_ids`, `labels`); answers and their end tokens are label tokens, prompts are not."""
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    config = dataset_config
    others = (config.input_column, config.system_column, config.history_column)
    examples = load_split(
        "alpaca_dataset",
        config,
        split,
        split_slice,
        text_columns=(config.instruction_column, config.output_column),
        other_columns=(*others, *LABELS, *MEDIA_COLUMNS),
        hub_name=HUB_NAME,
    )
    # An encoder reads earlier answers as text; an end token in it would be a source's end.
    end = tokenizer.eos_token if encode.is_one_text else ""
    return tokenize_split(examples, tokenizer, partial(to_spans, config=config, end=end), encode=encode)


def to_spans(example: Mapping[str, Any], *, config: AlpacaDataset, end: str) -> list[TextSpan]:
    refuse_labels(example)
    instruction, subject = example[config.instruction_column], optional_text(example, config.input_column)
    refuse_media(example, (instruction, subject))
    return alpaca_spans(
        instruction,
        subject,
        example[config.output_column],
        system=optional_text(example, config.system_column),
        history=list(read_history(example, config.history_column)),
        end=end,
        learns_empty_answers=config.learn_empty_answers,
    )
