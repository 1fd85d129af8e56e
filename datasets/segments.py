"""Text in parts, each learned or not (`segments` with `text` and `label`): Axolotl's template-free format.

python finetuning.py --model_name M --dataset segments_dataset --segments_dataset.data_path output.jsonl

The parts are joined as they are. Nothing is added: write start and end tokens yourself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from chat.lists_of_dicts import listed
from chat.turn_keys import refuse_lost_meaning
from configs.datasets import SPECIAL, DataSource
from configs.setting import setting
from data.files.json_values import DECODER
from data.tokens.spans import BadExample, ChatSamples, TextSpan
from data.tokens.special_text import SpecialTokens
from utils.errors import ConfigError


@dataclass(frozen=True)
class SegmentsDataset(DataSource):
    """Text in parts, each learned or not (--dataset segments_dataset)."""

    split_special_tokens: bool = setting(False, f"{SPECIAL}, as a row writes its own start and end tokens")
    segments_column: str = setting("segments", "column with the parts, a list of text and label (true or false)")

    @property
    def adds_start_token(self) -> bool | None:
        return None  # the parts bring it, or do not


def get_segments_dataset(
    dataset_config: SegmentsDataset, tokenizer: Any, split: str, split_slice: str | None = None
) -> Any:
    """Tokenized examples; the tokens of parts whose label is true are label tokens."""
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    column = dataset_config.segments_column
    examples = load_split("segments_dataset", dataset_config, split, split_slice, other_columns=(column,))
    if column not in examples.columns:
        raise ConfigError(
            f"{examples.name} has no column {column}; it has {examples.columns_there}: name the column of the "
            "parts with --segments_dataset.segments_column"
        )
    examples.refuse_absent([column])
    special = SpecialTokens.of(tokenizer) if dataset_config.split_special_tokens else None
    return tokenize_split(examples, tokenizer, partial(to_samples, column=column, special=special), by_template=True)


def to_samples(example: Mapping[str, Any], *, column: str, special: SpecialTokens | None = None) -> ChatSamples:
    parts = example.get(column)
    if isinstance(parts, str):
        try:
            parts = DECODER.decode(parts)
        except ValueError as error:
            raise BadExample(f"column {column} is no JSON ({error})") from error
    parts = listed(parts)
    if not isinstance(parts, list) or not parts:
        raise BadExample(f"column {column} needs a list of parts, each with text and label")
    spans = [_read_part(number, part) for number, part in enumerate(parts, 1)]
    if special is not None:
        spans = [span._replace(text=special.as_text(span.text)) for span in spans]
    unread = {f"{key} (segment)" for part in parts for key in part.keys() - {"text", "label"} if part[key] is not None}
    return ChatSamples([spans], None, unread_keys=tuple(sorted(unread)))


def _read_part(number: int, part: Any) -> TextSpan:
    text, label = (part.get(name) if isinstance(part, Mapping) else None for name in ("text", "label"))
    if not isinstance(text, str) or label not in (0, 1):
        raise BadExample(f"part {number} needs a text and a label that is true or false")
    for key, value in part.items():
        if key not in ("text", "label"):
            refuse_lost_meaning(key, value)
    return TextSpan(text, bool(label))
