"""Plain text, all of it learned: .txt files, or a column `text` of any table.

python finetuning.py --model_name M --dataset text_dataset --text_dataset.data_path 'books/*.txt'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from data.files import load_split
from data.loss_mask import Piece
from data.paths import READERS
from data.tokenizing import tokenize_rows


def get_text_dataset(dataset_config: Any, tokenizer: Any, split: str) -> Any:
    """Tokenised rows (`input_ids`, `labels`), each ended with the end token."""
    column = dataset_config.text_column
    source = load_split(
        "text_dataset",
        dataset_config,
        split,
        text_columns=(column,),
        kinds=tuple(READERS),
        sample_by=dataset_config.sample_by,
    )
    return tokenize_rows(source, tokenizer, partial(to_pieces, column=column))


def to_pieces(row: Mapping[str, Any], *, column: str) -> list[Piece]:
    return [Piece(row[column], True)]
