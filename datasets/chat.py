"""Conversations (`messages` with `role` and `content`; or ShareGPT's `conversations`), by the tokenizer's template.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset chat_dataset
    --chat_dataset.data_path my_chats/

The assistant's turns are learned, each with the token that ends it; system, user and tool turns are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from data.chat import chat_pieces, use_template
from data.files import load_split
from data.loss_mask import Piece
from data.tokenizing import tokenize_rows
from utils.errors import ConfigError

TURNS = ("messages", "conversations")


def get_chat_dataset(dataset_config: Any, tokenizer: Any, split: str) -> Any:
    """Tokenised rows (`input_ids`, `labels`)."""
    use_template(tokenizer, dataset_config.chat_template)
    columns = (dataset_config.messages_column,) if dataset_config.messages_column else TURNS
    tools = dataset_config.tools_column
    source = load_split("chat_dataset", dataset_config, split, other_columns=(*columns, tools))
    turns = next((column for column in columns if column in source.columns), None)
    if turns is None:
        raise ConfigError(
            f"{source.name} has no column {' or '.join(columns)}; it has {', '.join(source.all_columns)}: "
            "name the column of the turns with --chat_dataset.messages_column"
        )
    return tokenize_rows(
        source, tokenizer, partial(to_pieces, turns=turns, tools=tools, tokenizer=tokenizer), by_template=True
    )


def to_pieces(row: Mapping[str, Any], *, turns: str, tools: str, tokenizer: Any) -> list[Piece]:
    return chat_pieces(row[turns], row.get(tools), tokenizer)
