"""One rendering of a conversation that notes where the template begins each turn.

The template's loops over messages get a mark as the first thing that they write, so one rendering tells what otherwise
takes one for every turn. The text is the template's own without the marks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, nodes

from utils.chat_rendering import limited_environment
from utils.template_limits import TemplateLimitError, limited_rendering

_MARK = "\ufdef"  # not a character: no text holds it
_MARK_OF = "mark_of_turn"
_READS_TEXT = {"split", "rsplit", "startswith", "endswith", "replace", "find", "rfind", "index", "count", "partition"}


class RenderedStarts(NamedTuple):
    """A rendered text, and where each of its turns begins, never falling."""

    text: str
    starts: list[int]


def render_with_starts(source: str, messages: Sequence[dict[str, Any]], **values: Any) -> RenderedStarts | None:
    """A conversation as text, and where its turns begin; None if the template does not tell all of them.

    Args:
        messages: as JSON holds them: a template gets them as they are.
        values: what else the template reads.

    Raises:
        TemplateLimitError: if it takes too long, or too much memory.
    """
    numbers = {id(message): number for number, message in enumerate(messages)}

    def mark(value: Any) -> str:
        number = numbers.get(id(value))
        return "" if number is None else f"{_MARK}{number}{_MARK}"

    try:
        with limited_rendering():
            parts = _marked(source).render(messages=messages, **values, **{_MARK_OF: mark}).split(_MARK)
    except (TemplateLimitError, MemoryError):
        raise
    except Exception:  # whatever a template stumbles over; the rendering without marks says what is wrong
        return None
    starts, position = {}, len(parts[0])
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        starts[int(number)] = position  # the last loop over all messages is the one that writes
        position += len(text)
    found = [starts.get(number, -1) for number in range(len(messages))]
    return RenderedStarts("".join(parts[::2]), found) if found == sorted(found) and found[0] >= 0 else None


@lru_cache(maxsize=8)
def words_read(source: str) -> tuple[str, ...]:
    """The words that a template looks for in texts, as in `'</think>' in content` or `content.split('</think>')`."""
    tree = limited_environment().parse(source)
    found: set[Any] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _READS_TEXT:
            found |= {argument.value for argument in call.args if isinstance(argument, nodes.Const)}
    for named in tree.find_all(nodes.Filter):
        found |= {argument.value for argument in named.args if isinstance(argument, nodes.Const)}
    for compared in tree.find_all(nodes.Compare):
        found |= {compared.expr.value} if isinstance(compared.expr, nodes.Const) else set()
    return tuple(sorted(word for word in found if isinstance(word, str) and re.search(r"\W", word.strip())))


@lru_cache(maxsize=8)
def _marked(source: str) -> Template:
    environment = limited_environment()
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            of_turn = nodes.Call(nodes.Name(_MARK_OF, "load"), [nodes.Name(loop.target.name, "load")], [], None, None)
            written = nodes.Output([of_turn]).set_lineno(loop.lineno, override=True)
            loop.body.insert(0, written.set_environment(environment))
    return environment.from_string(tree)
