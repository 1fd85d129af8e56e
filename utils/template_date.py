"""The date that chat templates take for today: that of a run's first start, on whatever day it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from functools import partial
from typing import Any

from transformers.utils import chat_template_utils

DATE_FUNCTION = "strftime_now"  # the function that transformers gives templates


def date_of(tokenizer: Any) -> str | None:
    """The date of the tokenizer's run, as in 2026-11-26; None for that of the day."""
    return getattr(tokenizer, "template_date", None)


def asks_for_date(template: Any) -> bool:
    """Whether a chat template, or one of several by name, writes today's date."""
    return any(DATE_FUNCTION in text for text in _texts(template))


def give_date(tokenizer: Any, template: Any) -> None:
    """Let the templates take the date of the tokenizer's run for today.

    transformers keeps compiled templates, and lets no function through as an argument. So the function is put into the
    compiled template, before each use: it may have been dropped, or belong to another run.
    """
    for text in _texts(template):
        if DATE_FUNCTION in text:
            chat_template_utils._compile_jinja_template(text).globals[DATE_FUNCTION] = date_function(tokenizer)


def date_function(tokenizer: Any) -> Callable[[str], str]:
    """What writes the date of the tokenizer's run in a form, as templates ask for it."""
    return partial(_written, date_of(tokenizer))


def _written(day: str | None, form: str) -> str:
    now = datetime.now() if day is None else datetime.combine(date.fromisoformat(day), time())
    return now.strftime(form)


def _texts(template: Any) -> list[str]:
    texts = template.values() if isinstance(template, Mapping) else [template]
    return [text for text in texts if isinstance(text, str)]
