"""Conversations as text: transformers' own rendering of a chat template, within limits of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

from jinja2 import Template
from transformers.utils import chat_template_utils

from utils.template_date import DATE_FUNCTION, date_function
from utils.template_limits import LimitedEnvironment, limited_rendering


@lru_cache(maxsize=1)
def limited_environment() -> LimitedEnvironment:
    """transformers' environment of chat templates, with limits."""
    return LimitedEnvironment(chat_template_utils._compile_jinja_template("").environment)


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """The template; nothing of it is computed yet."""
    return limited_environment().from_string(source)


def _with_limits(function: Any) -> Any:
    """transformers' function, but for the templates that it compiles: it takes no environment as an argument."""
    names = {**function.__globals__, "_compile_jinja_template": compiled}
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


_render = _with_limits(chat_template_utils.render_jinja_template)


def render_chat(
    source: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, **options: Any
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """The text of a conversation, in a list; and the parts [first, last) that the template marks, if asked for.

    Args:
        source: the template. tokenizer: whose run's date it may write.
        options: of `render_jinja_template`, and what else the template reads.

    Raises:
        TemplateLimitError: if it takes too long, or too much memory.
        Exception: whatever else a template may do.
    """
    compiled(source).globals[DATE_FUNCTION] = date_function(tokenizer)
    with limited_rendering():
        texts, marks = _render([messages], chat_template=source, **options)
    return texts, marks


def rendered_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as the tokenizer's template shows them to the model, up to the assistant's answer.

    Raises: as `render_chat`.
    """
    source, values = tokenizer.get_chat_template(), tokenizer.special_tokens_map
    return render_chat(source, messages, tokenizer, **values, add_generation_prompt=True)[0][0]
