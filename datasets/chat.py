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
from data.chat.columns import adds_nulls, used_columns
from data.chat.conversation import columns_to_read, read_conversation
from data.chat.samples import chat_samples
from data.chat.template import ChatTemplate, use_template
from data.splits.reading import load_split
from data.tokenizing import tokenize_split
from data.tokens.loss_mask import ChatSamples


def get_chat_dataset(dataset_config: Any, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenised conversations (`input_ids`, `labels`)."""
    use_template(tokenizer, dataset_config.chat_template)
    examples = load_split(
        "chat_dataset", dataset_config, split, split_slice, other_columns=columns_to_read(dataset_config)
    )
    examples = used_columns(examples, dataset_config)
    options = {"config": dataset_config, "drop_nulls": adds_nulls(examples), "template": ChatTemplate.of(tokenizer)}
    return tokenize_split(examples, tokenizer, partial(to_spans, **options), by_template=True)


def to_spans(
    example: Mapping[str, Any], *, config: ChatDataset, template: ChatTemplate, drop_nulls: bool = False
) -> ChatSamples:
    written = template.tokenizer.chat_template
    conversation = read_conversation(example, config, chat_template=written, drop_nulls=drop_nulls)
    return chat_samples(conversation, template)
