"""A tokenizer's chat template: conversations as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat.conversation import Conversation
from chat.images import IMAGE, in_parts
from chat.turn_kinds import KindsOfTurns
from chat.turn_starts import RenderedStarts, render_with_starts, words_read
from data.tokens.spans import BadExample, UnboundedExample
from data.tokens.special_text import SpecialTokens
from utils.chat_rendering import render_chat
from utils.errors import ConfigError, in_one_line
from utils.small_files import read_text
from utils.template_date import DATE_FUNCTION, date_function
from utils.template_limits import TemplateLimitError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAG = "--chat_dataset.chat_template"

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def use_template(
    tokenizer: PreTrainedTokenizerBase, file: str | None, flag: str = FLAG, *, processor: Any = None
) -> None:
    """Give the tokenizer the template in `file`, which is then saved with the trained model; None keeps its own.

    Args:
        flag: that gave the file.
        processor: that has the tokenizer: its template is the model's, and both then have one.

    Raises:
        ConfigError: if the file cannot be read, or the tokenizer has no template.
    """
    if file is not None:
        try:
            tokenizer.chat_template = read_text(Path(file).expanduser(), encoding="utf-8-sig", most_bytes=2**22)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag}: {file} could not be read ({error}); name a file") from error
    elif own := getattr(processor, "chat_template", None):
        tokenizer.chat_template = own
    if processor is not None and processor is not tokenizer:
        processor.chat_template = tokenizer.chat_template
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{flag}: the tokenizer has no chat template; give one with {flag} FILE (for a base model "
            "datasets/samples/formats/chat.jinja will do), or take a model whose tokenizer has one"
        )


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer, and the tokens that can end a turn."""

    tokenizer: PreTrainedTokenizerBase
    special_tokens: tuple[str, ...]  # longest first
    flag: str = FLAG  # that gives another template
    special: SpecialTokens | None = None  # that stay text where the data spells them; None: they are tokens there, too
    image: str | None = None  # what it writes for an image; None: of a model of text alone
    # Whether it writes a key of the turns of a role, as it was found (`chat.unread_keys`).
    writes: dict[tuple[str, str], bool] = field(default_factory=dict, compare=False, repr=False)
    kinds: KindsOfTurns = field(default_factory=KindsOfTurns, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        flag: str = FLAG,
        *,
        split_special_tokens: bool = True,
        image: str | None = None,
    ) -> ChatTemplate:
        tokens = {token.content.strip() for token in tokenizer.added_tokens_decoder.values() if token.special} - {""}
        special = SpecialTokens.of(tokenizer) if split_special_tokens else None
        return cls(tokenizer, tuple(sorted(tokens, key=len, reverse=True)), flag, special, image)

    def with_special_as_text(self, conversation: Conversation) -> Conversation:
        """The conversation with stand-ins in the special tokens that it spells; itself if it spells none."""
        if self.special is None:
            return conversation
        said = [conversation.messages, conversation.tools, conversation.template_kwargs]
        return self._with_texts(conversation, self.special.as_text) if self.special.are_in(said) else conversation

    def check_special_as_text(self, conversation: Conversation) -> None:
        """Check that a conversation with stand-ins is written as it is without them.

        Raises:
            BadExample: if the template reads special tokens in what is said, or does not take it.
        """
        assert self.special is not None
        as_said, num_messages = self._with_texts(conversation, self.special.plain), len(conversation.messages)
        if self.special.plain(self.render(conversation, num_messages)) != self.render(as_said, num_messages):
            raise BadExample(
                "it spells special tokens, which the chat template reads and does not write as they are; take them out "
                "of the row, or let them be tokens (--split_special_tokens False)"
            )

    def _with_texts(self, conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
        messages = [{**change(message), "role": message["role"]} for message in conversation.messages]
        tokens = self.tokenizer.special_tokens_map
        kwargs = {name: said if name in tokens else change(said) for name, said in conversation.template_kwargs.items()}
        return replace(conversation, messages=messages, tools=change(conversation.tools), template_kwargs=kwargs)

    @property
    def mark_it(self) -> str:
        """The remedy if the assistant's part cannot be found."""
        return f"give a template that marks the assistant's parts with {{% generation %}} ({self.flag} FILE)"

    @property
    def write_it(self) -> str:
        """The remedy if it leaves out a part of a row."""
        return f"give a template that writes it ({self.flag} FILE), or take that out of the rows"

    def has_marks(self, conversation: Conversation) -> bool:
        """Whether it marks the assistant's parts with `{% generation %}`."""
        return _GENERATION.search(self.tokenizer.get_chat_template(tools=conversation.tools)) is not None

    def render(self, conversation: Conversation, num_messages: int, *, prompt: bool = False) -> str:
        """The first messages as text; with `prompt`, up to where the assistant's next turn begins.

        Raises:
            BadExample: if the template does not take them.
        """
        return self._render(conversation, num_messages, add_generation_prompt=prompt)[0][0]

    def render_marked(self, conversation: Conversation, num_messages: int) -> tuple[str, list[tuple[int, int]]]:
        """The first messages as text, and the parts [first, last) of it that the template marks.

        Raises:
            BadExample: if the template does not take them.
        """
        texts, marks = self._render(conversation, num_messages, return_assistant_tokens_mask=True)
        return texts[0], [(first, last) for first, last in marks[0] if first < last]

    def render_with_starts(self, conversation: Conversation, num_messages: int) -> RenderedStarts | None:
        """The first messages as text, and where each of them begins; None if that cannot be told.

        Raises:
            UnboundedExample: if it takes too long, or too much memory.
        """
        try:
            return render_with_starts(
                self.tokenizer.get_chat_template(tools=conversation.tools),
                self._messages(conversation, num_messages),
                **self._values(conversation) | {DATE_FUNCTION: date_function(self.tokenizer)},
            )
        except (TemplateLimitError, MemoryError) as error:
            raise self._unbounded(error) from error

    def words_read(self, conversation: Conversation) -> tuple[str, ...]:
        """The words that it looks for in what is said."""
        words = words_read(self.tokenizer.get_chat_template(tools=conversation.tools))
        return (*words, IMAGE) if conversation.images else words  # a turn with an image is another kind

    def special_at_end(self, text: str) -> str | None:
        """The special token that the text ends with."""
        return next((token for token in self.special_tokens if text.endswith(token)), None)

    def special_at_start(self, text: str) -> str | None:
        """The special token that the text begins with."""
        return next((token for token in self.special_tokens if text.startswith(token)), None)

    def _render(self, conversation: Conversation, num_messages: int, **options: bool) -> Any:
        try:
            return self._call(conversation, num_messages, **options)
        except (TemplateLimitError, MemoryError) as error:
            raise self._unbounded(error) from error
        except Exception as error:  # a template may divide by zero, or call what it should not
            turn = self._first_refused(conversation, num_messages, error)
            raise BadExample(
                f"the chat template does not take turn {turn} ({type(error).__name__}: {in_one_line(error)}); mend the "
                f"row, or give a template that takes it ({self.flag} FILE)"
            ) from error

    def _unbounded(self, error: Exception) -> UnboundedExample:
        reason = in_one_line(error) or "it takes more memory than there is"
        return UnboundedExample(f"the chat template cannot be rendered: {reason}; give another ({self.flag} FILE)")

    def _call(self, conversation: Conversation, num_messages: int, **options: bool) -> Any:
        return render_chat(
            self.tokenizer.get_chat_template(tools=conversation.tools),
            self._messages(conversation, num_messages),
            self.tokenizer,
            **self._values(conversation),
            **options,
        )

    def _messages(self, conversation: Conversation, num_messages: int) -> list[dict[str, Any]]:
        messages = conversation.messages[:num_messages]
        return [in_parts(message) for message in messages] if conversation.images else messages

    def _values(self, conversation: Conversation) -> dict[str, Any]:
        """What the template reads besides the messages."""
        return {**self.tokenizer.special_tokens_map, **conversation.template_kwargs, "tools": conversation.tools}

    def _first_refused(self, conversation: Conversation, num_messages: int, error: Exception) -> int:
        """The turn, from 1, with which the template begins to fail in this way."""
        for number in range(1, num_messages):
            try:
                self._call(conversation, number)
            except TemplateLimitError:
                break
            except Exception as found:  # whatever a template stumbles over
                if str(found) == str(error):
                    return number
        return num_messages
