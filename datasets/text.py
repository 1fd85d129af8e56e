"""Plain text, all label tokens: .txt files, or a column `text` of any table.

python finetuning.py --model_name M --dataset text_dataset --text_dataset.data_path 'books/*.txt'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from data.files.kinds import ALL_KINDS
from data.splits.reading import load_split
from data.tokenizing import tokenize_split
from data.tokens.loss_mask import TextSpan


def get_text_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised texts, each with the end token; all tokens are label tokens."""
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
