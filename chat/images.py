"""The images of a row, in whichever way it names them: parts of a content, or placeholders in texts and a column.

In a message's text an image is one character, so whatever reads texts reads on. Just before a template is rendered, the
text becomes parts, which the templates of models of image and text take.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data.tokens.spans import BadExample
from utils.wording import plural

IMAGE = "\uffff"
"""Stands for an image in a message's text. It is not a character: no text holds it."""

COLUMNS = ("images", "image")
KINDS = ("image", "image_url", "input_image")
SOURCES = ("image", "image_url", "path", "url", "bytes", "base64", "source", "file_name", "image_path")
PART_KEYS = frozenset((*SOURCES, "index"))

_PLACEHOLDER = "<image>"
_FALSE: tuple[Any, ...] = ("", [], {}, None)


class _OfColumn(NamedTuple):
    """An image of the row's column: the one with this index, or the next."""

    place: int | None  # from 0


@dataclass
class RowImages:
    """The images of one row: what its column holds, and what its turns name, in the order in which they are read."""

    column: Sequence[Any]
    reads_placeholders: bool  # `<image>` in a text is the place of the column's next image
    found: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, example: Mapping[str, Any], turns: Sequence[Any], column: str | None) -> RowImages:
        """
        Args:
            example: all columns of the row that were asked for, those that it leaves empty too.
            turns: of the row, as they stand there.
            column: of the images; None: `images` or `image`.

        Raises:
            BadExample: if both have images.
        """
        names = [name for name in ((column,) if column else COLUMNS) if name in example]
        given = [name for name in names if example[name] not in _FALSE]
        if len(given) > 1:
            raise BadExample(f"it has images in {' and '.join(given)}; leave one of them out")
        value = example[given[0]] if given else []
        return cls(_listed(value), bool(names) and not any(map(is_image_part, _parts(turns))))

    def in_text(self, text: str) -> str:
        """A text of a turn, with one character for each image that has its place there.

        Raises:
            BadExample: if the text holds that character.
        """
        if IMAGE in text:
            raise BadExample("it holds a code point that is no character (U+FFFF); take it out")
        if not self.reads_placeholders or _PLACEHOLDER not in text:
            return text
        self.found += [_OfColumn(None)] * text.count(_PLACEHOLDER)
        return text.replace(_PLACEHOLDER, IMAGE)

    def of_part(self, part: Mapping[str, Any]) -> str:
        """A part of a content that is an image, as text."""
        key = next((key for key in SOURCES if part.get(key) not in _FALSE), None)
        if key is None:
            self.found.append(_OfColumn(part.get("index")))
        else:
            self.found.append(_source({key: part[key]} if key == "base64" else part[key]))
        return IMAGE

    def of_turn(self, values: Any, text: str) -> str:
        """The text of a turn that has images of its own, at their placeholders or before its text.

        Raises:
            BadExample: if there are other numbers of images and placeholders.
        """
        values = _listed(values)
        num_places = text.count(_PLACEHOLDER)
        if num_places not in (0, len(values)):
            raise BadExample(f"it has {plural(len(values), 'image')} and {num_places} times {_PLACEHOLDER}")
        self.found += map(_source, values)
        return text.replace(_PLACEHOLDER, IMAGE) if num_places else IMAGE * len(values) + text

    def placed(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
        """The messages, and their images in order. Images without any place come first in the first user's turn.

        Raises:
            BadExample: if the turns have places for more images than there are, or for fewer.
        """
        if self.column and not self.found:
            first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
            if first is None:
                raise BadExample("it has images, and no turn of the user's to show them in")
            text = IMAGE * len(self.column) + messages[first]["content"]
            messages = [*messages[:first], {**messages[first], "content": text}, *messages[first + 1 :]]
            return messages, tuple(map(_source, self.column))
        following = iter(range(len(self.column)))
        used, images = [], []
        for value in self.found:
            if isinstance(value, _OfColumn):
                used.append(next(following, -1) if value.place is None else value.place)
            images.append(value)
        if not all(isinstance(place, int) for place in used) or set(used) != set(range(len(self.column))):
            raise BadExample(
                f"it has {plural(len(self.column), 'image')} in its column, and places for {len(used)} in its turns "
                f"({_PLACEHOLDER}, or parts of type image); give as many of one as of the other"
            )
        places = iter(used)
        return messages, tuple(
            _source(self.column[next(places)]) if isinstance(value, _OfColumn) else value for value in images
        )


def is_image_part(part: Any) -> bool:
    """Whether a part of a content is an image."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in KINDS or (kind is None and any(part.get(key) not in _FALSE for key in KINDS))


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the templates of models of image and text take it: its images are parts of its content."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    if not any(isinstance(text, str) and IMAGE in text for text in texts):
        return message
    return {**message, "content": [part for text in texts for part in _split(text or "")]}


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """The images in the texts of messages."""
    contents = [message.get("content") or "" for message in messages]
    texts = [
        content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
        for content in contents
    ]
    return sum(text.count(IMAGE) for text in texts)


def texts_between(text: str) -> list[str]:
    """The parts of a message's text between its images, those that are not blank."""
    return [part for part in text.split(IMAGE) if part.strip()] if IMAGE in text else [text]


def _split(text: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(text.split(IMAGE)):
        if number:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


def _listed(value: Any) -> list[Any]:
    """The images of a column. A cell of a CSV file holds a list as text, as Python or JSON writes it."""
    if isinstance(value, str) and value.strip().startswith("["):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            read = ast.literal_eval(value.strip())
            if isinstance(read, list) and all(isinstance(image, str) for image in read):
                return read
    return value if isinstance(value, list) else [value]


def _parts(turns: Sequence[Any]) -> Iterator[Any]:
    for turn in turns:
        content = (turn.get("content") or turn.get("value")) if isinstance(turn, Mapping) else None
        yield from content if isinstance(content, list) else ()


def _source(value: Any) -> Any:
    """The file or the bytes of an image, out of the forms of OpenAI and Anthropic."""
    if not isinstance(value, Mapping):
        return value
    inner = next((value[key] for key in ("url", "image_url", "data", "base64") if value.get(key) not in _FALSE), None)
    if inner is None:
        return value
    is_encoded = isinstance(inner, str) and ("data" in value or "base64" in value) and not inner.startswith("data:")
    return f"data:;base64,{inner}" if is_encoded else _source(inner)
