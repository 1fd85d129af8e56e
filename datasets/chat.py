"""Conversations (`messages` with `role` and `content`, or ShareGPT's `conversations`), by the chat template.

torchrun --nproc_per_node 2 finetuning.py --enable_fsdp --model_name M --dataset chat_dataset
    --chat_dataset.data_path my_chats/

The assistant's turns are label tokens, each with the token that ends it; system, user and tool turns are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from chat.conversation import columns_to_read, read_conversation
from chat.samples import chat_samples
from configs.datasets import DataSource
from configs.setting import setting
from data.tokens.spans import ChatSamples
from utils.errors import ConfigError

if TYPE_CHECKING:
    from chat.template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool", "function_call")
"""The roles of turns; a function_call turn is the assistant's and holds the JSON of a call."""


@dataclass(frozen=True)
class ChatDataset(DataSource):
    """Conversations; the assistant's turns are the labels (--dataset chat_dataset)."""

    messages_column: str | None = setting(None, "column with the turns; unset: messages, or conversations")
    tools_column: str = setting("tools", "column with the tools that a conversation may call; it may be missing")
    chat_template: str | None = setting(
        None, "file with a Jinja chat template; unset: the tokenizer's own", is_path=True
    )
    roles: tuple[str, ...] = setting(
        (), f"the data's own names of roles, as in critic=user,writer=assistant; roles are {', '.join(ROLES)}"
    )
    preference: Literal["chosen"] | None = setting(
        None, "of preference data (chosen and rejected, label, kto_tag), learn the good answers; unset: refuse it"
    )
    learn: Literal["all", "last"] = setting("all", "which of the assistant's turns are learned: all, or the last")

    @property
    def adds_start_token(self) -> bool:
        return False  # the template writes it

    def role_names(self) -> dict[str, str]:
        """The role of each name in `roles`."""
        return dict(pair.split("=", 1) for pair in self.roles)

    def check(self, flag: str) -> None:
        for pair in self.roles:
            name, equals, role = pair.partition("=")
            if not (name and equals and role in (*ROLES, name)):
                raise ConfigError(
                    f"{flag}.roles: {pair!r} names no role; write NAME=ROLE, with one of {', '.join(ROLES)}"
                )


def get_chat_dataset(dataset_config: ChatDataset, tokenizer: Any, split: str, split_slice: str | None = None) -> Any:
    """Tokenized conversations (`input_ids`, `labels`)."""
    from chat.columns import nested_columns, used_columns
    from chat.template import ChatTemplate, use_template
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split

    use_template(tokenizer, dataset_config.chat_template)
    examples = load_split(
        "chat_dataset", dataset_config, split, split_slice, other_columns=columns_to_read(dataset_config)
    )
    examples = used_columns(examples, dataset_config)
    template = ChatTemplate.of(tokenizer, split_special_tokens=dataset_config.split_special_tokens)
    options = {"config": dataset_config, "nested_columns": nested_columns(examples), "template": template}
    return tokenize_split(examples, tokenizer, partial(to_spans, **options), by_template=True)


def to_spans(
    example: Mapping[str, Any],
    *,
    config: ChatDataset,
    template: ChatTemplate,
    nested_columns: frozenset[str] = frozenset(),
) -> ChatSamples:
    written = template.tokenizer.chat_template
    conversation = read_conversation(example, config, chat_template=written, nested_columns=nested_columns)
    return chat_samples(conversation, template)
