"""Conversations through a tokenizer's chat template, as spans of text; the assistant's turns count in the loss.

The template renders the whole conversation to one text. If it has `{% generation %}`, it marks the assistant's spans.
Otherwise the conversation is rendered up to each of the assistant's turns, and up to its end; both texts must be
prefixes of the whole, which is checked. A span with a loss runs from the end of the generation prompt to the token that
ends the turn.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from data.conversation import Conversation
from data.loss_mask import BadExample, TextSpan
from utils.errors import ConfigError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = "give a template that marks the assistant's parts with {% generation %} (--chat_dataset.chat_template FILE)"


def use_template(tokenizer: Any, file: str | None) -> None:
    """Give the tokenizer the template in `file`, which is then saved with the trained model; None keeps its own.

    Raises:
        ConfigError: if the file cannot be read, or the tokenizer has no template.
    """
    if file is not None:
        try:
            tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat_dataset.chat_template: {file} could not be read ({error}); name a file"
            ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            "--chat_dataset: the tokenizer has no chat template; give one with --chat_dataset.chat_template FILE, or "
            "take a model whose tokenizer has one"
        )


def chat_spans(conversation: Conversation, tokenizer: Any) -> list[TextSpan]:
    """A conversation's rendered text as spans; the assistant's have a loss, each with the token that ends it.

    Raises:
        BadExample: if the template does not take it, or does not tell the assistant's part.
    """
    messages, tools = conversation.messages, conversation.tools
    try:
        if _GENERATION.search(tokenizer.get_chat_template(tools=tools)):
            text, places = _marked_by_template(conversation, tokenizer)
            answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            if not all(conversation.has_loss[number] for number in answers):
                if len(places) != len(answers):
                    raise BadExample("the chat template's marks are not one for each of the assistant's turns")
                places = [place for number, place in zip(answers, places, strict=True) if conversation.has_loss[number]]
        else:
            text, places = _found_by_prefixes(conversation, tokenizer)
    except BadExample:
        raise
    except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise BadExample(f"the chat template does not take it ({type(error).__name__}: {error})") from error
    spans, position = [], 0
    for first, last in places:
        spans += [TextSpan(text[position:first], False), TextSpan(text[first:last], True)]
        position = last
    return [*spans, TextSpan(text[position:], False)]


def _marked_by_template(conversation: Conversation, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    render: Any = render_jinja_template  # its annotation says str
    rendered, marks = render(
        [conversation.messages],
        tools=conversation.tools,
        chat_template=tokenizer.get_chat_template(tools=conversation.tools),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **conversation.template_kwargs},
    )
    text, places = rendered[0], [tuple(mark) for mark in marks[0]]
    if not places:
        raise BadExample("the chat template marks none of its turns with {% generation %}")
    return text, [(first, _end_of_turn(text, first, last, tokenizer)) for first, last in places]


def _found_by_prefixes(conversation: Conversation, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    def render(number: int, *, prompts: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:number],
            tools=tools,
            tokenize=False,
            add_generation_prompt=prompts,
            **conversation.template_kwargs,
        )

    messages, tools = conversation.messages, conversation.tools
    text, places = render(len(messages), prompts=False), []
    for index in range(len(messages)):
        if not conversation.has_loss[index]:
            continue
        if index == 0:
            raise BadExample(f"it begins with the assistant's turn, where the chat template has no prompt; {_REMEDY}")
        before = render(index, prompts=True)
        upto = render(index + 1, prompts=False)
        if not (text.startswith(upto) and upto.startswith(before)):
            raise BadExample(
                f"the chat template writes turn {index + 1} differently, or what stands before it, when other turns "
                f"follow, so the assistant's part cannot be told; {_REMEDY}"
            )
        places.append((len(before), _end_of_turn(text, len(before), len(upto), tokenizer)))
    return text, places


def _end_of_turn(text: str, first: int, last: int, tokenizer: Any) -> int:
    """The end of the turn text[first:last], after its end token; newlines behind it belong to what follows."""
    turn = text[first:last].rstrip()
    if not any(turn.endswith(token.content.strip()) for token in _special_tokens(tokenizer)):
        raise BadExample(
            f"the chat template ends the assistant's turn with no end token, so answers would never end; {_REMEDY}"
        )
    return first + len(turn)


def _special_tokens(tokenizer: Any) -> list[Any]:
    return [token for token in tokenizer.added_tokens_decoder.values() if token.special and token.content.strip()]
