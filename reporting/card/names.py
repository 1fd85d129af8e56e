"""Names of models and data for others' eyes: those of the hub, or of a folder or file without its path."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from utils.urls import is_url

_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_IN_CACHE = re.compile(r"(?:models|datasets)--([^/]+?)--([^/]+)(?:/|$)")  # a folder of the hub's cache


def hub_name(name: str) -> str | None:
    """OWNER/NAME of a model or dataset on the hub, or in its cache here; None if this is a path."""
    if cached := _IN_CACHE.search(name):
        return f"{cached[1]}/{cached[2]}"
    if not _ON_HUB.fullmatch(name) or name.startswith(".") or Path(name).exists():
        return None
    return name


def public_name(name: str) -> str:
    """The name on the hub, or the last part of a path or URL; on one line."""
    last = hub_name(name) or PurePath(urlsplit(name).path if is_url(name) else name).name or name
    return " ".join(last.split())


def in_markdown(text: str) -> str:
    """A text from anywhere, as Markdown shows it literally: on one line, also in a table's cell."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", one_line)
