"""Plain text, all label tokens: .txt files, or a column `text` of any table.

python finetuning.py --model_name M --dataset text_dataset --text_dataset.data_path 'books/*.txt'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from configs.datasets import DataSource
from configs.setting import setting
from data.files.kinds import ALL_KINDS
from data.tokens.spans import TextSpan


@dataclass(frozen=True)
class TextDataset(DataSource):
    """Plain text; every token is a label (--dataset text_dataset)."""

    DEFAULT_TRUNCATION = "split"

    text_column: str = setting("text", "column with the text")
    sample_by: Literal["line", "paragraph", "document"] = setting(
        "paragraph", "what is one example in a .txt file: a line, a paragraph between blank lines, or the whole file"
    )


def get_text_dataset(dataset_config: TextDataset, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenized texts, each with the end token; all tokens are label tokens."""
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    column = dataset_config.text_column
    examples = load_split(
        "text_dataset",
        dataset_config,
        split,
        split_slice,
        text_columns=(column,),
        kinds=ALL_KINDS,
        sample_by=dataset_config.sample_by,
    )
    return tokenize_split(examples, tokenizer, partial(to_spans, column=column))


def to_spans(example: Mapping[str, Any], *, column: str) -> list[TextSpan]:
    return [TextSpan(example[column], True)]
