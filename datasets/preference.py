"""Pairs of answers, a chosen and a rejected one, for --loss_type dpo, simpo and orpo (`chosen`, `rejected`).

python finetuning.py --model_name M --loss_type dpo --dataset preference_dataset
    --preference_dataset.data_path my_pairs.jsonl

The answers are turns, or texts with a `prompt`; a prompt may also be what both begin with. The chat template writes
them; with --preference_dataset.as_chat False, texts are joined as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from chat.conversation import columns_to_read
from chat.preference import REJECTED
from configs.datasets import DataSource
from configs.setting import setting
from data.tokens.spans import ChatSamples
from utils.errors import ConfigError

if TYPE_CHECKING:
    from chat.template import ChatTemplate
    from data.splits.examples import SplitExamples


@dataclass(frozen=True)
class PreferenceDataset(DataSource):
    """Pairs of a chosen and a rejected answer (--dataset preference_dataset)."""

    DEFAULT_TRUNCATION: ClassVar = "left"  # of the prompt; answers are never cut
    HAS_PAIRS: ClassVar[bool] = True

    as_chat: bool = setting(
        True, "write a prompt and its answers that are texts as turns, by the chat template; False: join them as texts"
    )
    tools_column: str = setting("tools", "column with the tools that a conversation may call; it may be missing")
    chat_template: str | None = setting(
        None, "file with a Jinja chat template; unset: the tokenizer's own", is_path=True
    )

    # What conversations are read by, besides the above (`chat.conversation.ChatSettings`).

    @property
    def messages_column(self) -> str | None:
        return None

    @property
    def preference(self) -> Literal["chosen"]:
        return "chosen"

    @property
    def learn(self) -> Literal["all"]:
        return "all"

    @property
    def image_column(self) -> None:
        return None

    def role_names(self) -> dict[str, str]:
        return {}

    @property
    def adds_start_token(self) -> bool:
        return not self.as_chat

    def check(self, flag: str) -> None:
        if self.chat_template is not None and not self.as_chat:
            raise ConfigError(f"{flag}.chat_template: only {flag}.as_chat uses it; leave one of them out")
        if self.streaming:
            raise ConfigError(f"{flag}.streaming: pairs are read before the first step; leave this out")


def get_preference_dataset(
    dataset_config: PreferenceDataset, tokenizer: Any, split: str, split_slice: str | None = None
) -> Any:
    """Tokenized pairs: a row's two texts end to end, their lengths in `sample_lengths`."""
    from chat.columns import nested_columns
    from chat.template import ChatTemplate, use_template
    from data.splits.reading import load_split
    from data.tokenizing import tokenize_split
    from data.tokens.special_text import SpecialTokens

    config, options = dataset_config, dict[str, Any]()
    examples = load_split("preference_dataset", config, split, split_slice, other_columns=columns_to_read(config))
    _check_columns(examples)
    if config.as_chat:
        flag = "--preference_dataset.chat_template"
        use_template(tokenizer, config.chat_template, flag)
        options["template"] = ChatTemplate.of(tokenizer, flag, split_special_tokens=config.split_special_tokens)
        options["nested_columns"] = nested_columns(examples)
        return tokenize_split(examples, tokenizer, partial(to_chats, config=config, **options), by_template=True)
    options["special"] = SpecialTokens.of(tokenizer) if config.split_special_tokens else None
    options["learns_empty_answers"] = config.learn_empty_answers
    return tokenize_split(examples, tokenizer, partial(to_texts, tokenizer=tokenizer, **options), by_template=True)


def _check_columns(examples: SplitExamples) -> None:
    """Refuse a file without answers.

    Raises:
        ConfigError: with the columns that it has.
    """
    there = {*examples.columns}
    if not any({chosen, rejected} <= there for chosen, rejected in REJECTED.items()):
        raise ConfigError(
            f"{examples.name} has no columns chosen and rejected; it has {examples.columns_there}: pairs need both"
        )


def to_chats(
    example: Mapping[str, Any],
    *,
    config: PreferenceDataset,
    template: ChatTemplate,
    nested_columns: frozenset[str] = frozenset(),
) -> ChatSamples:
    from chat.pairs import pair_of_turns

    return pair_of_turns(example, config, template, nested_columns)


def to_texts(example: Mapping[str, Any], *, tokenizer: Any, special: Any, learns_empty_answers: bool) -> ChatSamples:
    from chat.pairs import pair_of_texts

    return pair_of_texts(example, tokenizer, special, learns_empty_answers=learns_empty_answers)
