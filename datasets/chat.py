"""Conversations (`messages` with `role` and `content`, or ShareGPT's `conversations`), by the chat template.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset chat_dataset
    --chat_dataset.data_path my_chats/

The assistant's turns are label tokens, each with the token that ends it; system, user and tool turns are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from configs.datasets import ChatDataset
from data.chat import chat_spans, use_template
from data.conversation import columns_to_read, read_conversation, turn_columns
from data.loss_mask import TextSpan
from data.preference import LABELS, PREFERENCE_COLUMNS
from data.splits import load_split
from data.tokenizing import tokenize_split
from utils.errors import ConfigError
from utils.printing import print_line
from utils.progress import shows_progress


def get_chat_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised conversations (`input_ids`, `labels`)."""
    use_template(tokenizer, dataset_config.chat_template)
    examples = load_split(
        "chat_dataset", dataset_config, split, split_slice, other_columns=columns_to_read(dataset_config)
    )
    columns = turn_columns(dataset_config)
    if not any(column in examples.columns for column in (*columns, "completion", *PREFERENCE_COLUMNS)):
        raise ConfigError(
            f"{examples.name} has no column {' or '.join(columns)}; it has {', '.join(examples.all_columns)}: "
            "name the column of the turns with --chat_dataset.messages_column"
        )
    if dataset_config.preference and set(LABELS) & set(examples.columns) and shows_progress():
        print_line(f"{examples.place}: rows that are labelled false are left out (--chat_dataset.preference chosen)")
    drop_nulls = _has_struct("arguments", examples.data.features)
    if drop_nulls and shows_progress():
        print_line(
            f"{examples.place}: nulls inside the arguments of calls are left out, since its columns give each call the "
            "keys of all others; write arguments as JSON text to keep them"
        )
    options = {"config": dataset_config, "drop_nulls": drop_nulls, "tokenizer": tokenizer}
    return tokenize_split(examples, tokenizer, partial(to_spans, **options), by_template=True)


def to_spans(
    example: Mapping[str, Any], *, config: ChatDataset, tokenizer: Any, drop_nulls: bool = False
) -> list[TextSpan]:
    template = tokenizer.chat_template
    conversation = read_conversation(example, config, chat_template=template, drop_nulls=drop_nulls)
    empty_answers = [TextSpan("", True)] * conversation.num_empty_answers  # which are counted where spans are tokenised
    return [*chat_spans(conversation, tokenizer), *empty_answers]


def _has_struct(name: str, feature: Any) -> bool:
    """Whether a column is made of dicts that hold dicts under this name, all with the same keys."""
    if isinstance(feature, Mapping):
        return isinstance(feature.get(name), Mapping) or any(_has_struct(name, part) for part in feature.values())
    return _has_struct(name, getattr(feature, "feature", None)) if feature is not None else False
