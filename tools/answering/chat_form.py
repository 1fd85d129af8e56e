"""How the chat template shows turns to a model, and the token that ends its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from chat.conversation import Conversation
from chat.prompt import prompt_of
from chat.samples import chat_samples
from chat.template import ChatTemplate
from chat.turns import Message
from data.tokens.spans import BadExample
from tasks.generation import AnswerSettings
from utils.errors import ConfigError, in_one_line


@dataclass(frozen=True)
class ChatForm:
    """The tokenizer's chat template, as it wrote the samples of training."""

    template: ChatTemplate
    end_ids: tuple[int, ...]  # the token that ends the assistant's turn in training; it need not be the tokenizer's

    @classmethod
    def of(cls, tokenizer: Any, *, split_special_tokens: bool = True) -> ChatForm:
        template = ChatTemplate.of(tokenizer, split_special_tokens=split_special_tokens)
        return cls(template, _turn_end_ids(template))

    def settings(self, settings: AnswerSettings) -> AnswerSettings:
        """The settings of an answer to turns that the template has written."""
        # A template brings its own start token. Special tokens that turns spell stay text, if they did in training.
        return replace(settings, add_bos=False, more_end_ids=self.end_ids, special=self.template.special)

    def prompt(self, conversation: Conversation) -> str:
        """The turns as the template shows them to the model, up to the assistant's answer.

        Raises:
            ConfigError: if the template does not take them.
        """
        try:
            return prompt_of(conversation, self.template)
        except BadExample as error:
            reason = in_one_line(error.__cause__) if isinstance(error.__cause__, Exception) else str(error)
            raise ConfigError(f"the chat template does not take these turns ({reason}); change them") from error


def as_conversation(messages: list[Message], **template_kwargs: Any) -> Conversation:
    """Turns that nothing is learned from.

    Args:
        template_kwargs: what the template reads besides the turns.
    """
    return Conversation(messages, (False,) * len(messages), template_kwargs=template_kwargs)


def as_user_turn(text: str) -> Conversation:
    """A conversation that begins with a user's turn."""
    return as_conversation([{"role": "user", "content": text}])


def _turn_end_ids(template: ChatTemplate) -> tuple[int, ...]:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        samples = chat_samples(Conversation(turns, has_loss=(False, True)), template)
    except BadExample:
        return ()
    answers = [span.text for spans in samples.spans for span in spans if span.has_loss]
    return tuple(template.tokenizer.encode(answers[-1], add_special_tokens=False)[-1:])
