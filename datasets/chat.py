"""Conversations (`messages` with `role` and `content`, or ShareGPT's `conversations`), by the chat template.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset chat_dataset
    --chat_dataset.data_path my_chats/

The assistant's turns are label tokens, each with the token that ends it; system, user and tool turns are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from data.chat import chat_spans, use_template
from data.loss_mask import TextSpan
from data.splits import load_split
from data.tokenizing import tokenize_split
from utils.errors import ConfigError

TURNS = ("messages", "conversations")


def get_chat_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised conversations (`input_ids`, `labels`)."""
    use_template(tokenizer, dataset_config.chat_template)
    columns = (dataset_config.messages_column,) if dataset_config.messages_column else TURNS
    tools = dataset_config.tools_column
    examples = load_split("chat_dataset", dataset_config, split, split_slice, other_columns=(*columns, tools))
    turns = next((column for column in columns if column in examples.columns), None)
    if turns is None:
        raise ConfigError(
            f"{examples.name} has no column {' or '.join(columns)}; it has {', '.join(examples.all_columns)}: "
            "name the column of the turns with --chat_dataset.messages_column"
        )
    return tokenize_split(
        examples, tokenizer, partial(to_spans, turns=turns, tools=tools, tokenizer=tokenizer), by_template=True
    )


def to_spans(example: Mapping[str, Any], *, turns: str, tools: str, tokenizer: Any) -> list[TextSpan]:
    return chat_spans(example[turns], example.get(tools), tokenizer)
