"""A sandbox for chat templates, which may come from anywhere: it bounds the time and the memory of a rendering.

Jinja's own sandbox bounds neither. Time is looked at where a template can go on for long: at each item of a loop and at
each call. So no signal and no thread is needed, and it works wherever a template is rendered: in a forked process, in
a thread, beside other renderings. Sizes are looked at before a text or a list is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, Undefined, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
"""Of one rendering, as time that its thread computes: a busy machine refuses no conversation. Most take less than a
thousandth of a second."""

MAX_CHARACTERS = 2**27
"""Of a text that a template makes, or 16 for each item of a list. All of them together may have eight times as many."""

_STEPS_BETWEEN_LOOKS = 256
_LARGEST_WIDTH = 10**6
_BITS = 10**6  # of a whole number
_WIDE = re.compile(r"\d{7}")  # of a format, as in %9999999d
_WIDTH_OF_ARGUMENT = re.compile(r"%[-+ #0]*\*|\{[^{}]*:[^{}]*\{")
_LOOKED_AT, _JOINED = "items of a loop", "parts of a text"
_PADDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}
_PADDING_FILTERS = {"center", "indent", "batch", "slice", "wordwrap", "tojson"}


class TemplateLimitError(Exception):
    """A template that takes too long, or makes texts that are too large."""


class _Limits:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MAX_SECONDS
        self.num_steps = self.num_characters = 0

    def count_step(self) -> None:
        self.num_steps += 1
        if self.num_steps % _STEPS_BETWEEN_LOOKS == 0 and time.thread_time() > self.deadline:
            raise TemplateLimitError(f"it is not done after {MAX_SECONDS:g} seconds; does a loop of it end?")

    def count_characters(self, number: int, num_added: int | None = None) -> None:
        """Args: num_added: to another text, which is most likely not needed any more; None: all of them."""
        self.num_characters += number if num_added is None else num_added
        if number > MAX_CHARACTERS or self.num_characters > 8 * MAX_CHARACTERS:
            raise TemplateLimitError(f"it makes a text of more than {MAX_CHARACTERS:,} characters, or many of them")


_limits = ContextVar[_Limits]("of the rendering that goes on in this thread")


@contextmanager
def limited_rendering() -> Iterator[None]:
    """What a `LimitedEnvironment` renders inside of this is bounded.

    Raises:
        TemplateLimitError: if it takes too long, or too much memory.
    """
    before = _limits.set(_Limits())
    try:
        yield
    finally:
        _limits.reset(before)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates are rendered under `limited_rendering`.

    Args:
        like: an environment with the same syntax, filters and functions.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, like: ImmutableSandboxedEnvironment) -> None:
        extensions = [type(extension) for extension in like.extensions.values()]
        super().__init__(trim_blocks=like.trim_blocks, lstrip_blocks=like.lstrip_blocks, extensions=extensions)
        self.globals.update(like.globals)
        self.filters = {name: _limited_filter(name, function) for name, function in like.filters.items()}
        self.filters |= {_LOOKED_AT: _looked_at, _JOINED: _joined}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_LookedAt(source, self).visit(source), *args, **kwargs)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        limits = _limits.get()
        limits.count_step()
        of = getattr(function, "__self__", None)
        if isinstance(of, str):
            _check_method(limits, of, function.__name__, args)
        elif isinstance(of := getattr(getattr(function, "__wrapped__", None), "__self__", None), str):
            _check_format(of, (*args, *kwargs.values()))  # the sandbox's own str.format
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        limits = _limits.get()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # by far the most
            limits.count_characters(len(left) + len(right), min(len(left), len(right)))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        else:
            limits.count_characters(_size_of(operator, left, right))
        return self.binop_table[operator](left, right)


@pass_context
def _looked_at(context: Context, items: Any) -> Iterator[Any]:
    """The items of a loop, each of which is a step."""
    return _counted(iter(items), _limits.get())


@pass_context
def _joined(context: Context, parts: Sequence[Any]) -> str:
    """The parts as one text, as `~` makes it."""
    sizes = [len(part) for part in parts if isinstance(part, str)]
    _limits.get().count_characters(sum(sizes), sum(sizes) - max(sizes, default=0))
    return str_join(parts)


class _LookedAt(NodeTransformer):
    """Loops and `~` of a template by way of filters, which count. Their names are none that a template could write."""

    def __init__(self, template: nodes.Template, environment: LimitedEnvironment) -> None:
        self.environment = environment
        self.escapes = template.find(nodes.ScopedEvalContextModifier) is not None  # `~` then does something else

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._filter(_LOOKED_AT, node.iter, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return node if self.escapes else self._filter(_JOINED, nodes.List(node.nodes), node)

    def _filter(self, name: str, value: Any, of: nodes.Node) -> nodes.Filter:
        made = nodes.Filter(value, name, [], [], None, None)
        made.set_lineno(of.lineno)
        made.set_environment(self.environment)
        return made


def _counted(items: Iterator[Any], limits: _Limits) -> Iterator[Any]:
    for item in items:
        limits.count_step()
        yield item


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 + hasattr(function, "jinja_pass_arg")  # after the value, and what Jinja puts before it
    if name not in (*_PADDING_FILTERS, "format", "join", "replace"):
        return function

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        value, others = args[first - 1], [*args[first:], *kwargs.values()]
        if name in _PADDING_FILTERS:
            _check_widths(others)
        elif name == "format":
            _check_format(str(value), others)
        elif (limits := _limits.get(None)) is not None:  # none while a template is compiled
            texts = [other for other in others if isinstance(other, str)]
            if name == "join":
                value = args[first - 1] if isinstance(args[first - 1], str | Undefined) else [*args[first - 1]]
                args = (*args[: first - 1], value, *args[first:])
                limits.count_characters(_size_of_join(texts[0] if texts else "", value))
            elif len(texts) == 2:
                _check_method(limits, str(value), name, texts)
        return function(*args, **kwargs)

    return limited


def _check_method(limits: _Limits, text: str, name: str, args: Sequence[Any]) -> None:
    """Check the size of what a method of a text would make."""
    if name in _PADDING_METHODS:
        _check_widths(args)
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        if len(text) * len(args[1]) > MAX_CHARACTERS:
            limits.count_characters(text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        limits.count_characters(_size_of_join(text, args[0]))


def _size_of_join(between: str, parts: Iterable[Any]) -> int:
    sizes = [len(part) if isinstance(part, str) else 0 for part in parts]
    return sum(sizes) + len(sizes) * len(between)


def _check_format(text: str, values: Iterable[Any]) -> None:
    if _WIDE.search(text):
        raise TemplateLimitError("it formats something by a width of more than a million")
    if _WIDTH_OF_ARGUMENT.search(text):
        _check_widths(values)


def _check_widths(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _LARGEST_WIDTH for value in values):
        raise TemplateLimitError("it formats something by a width of more than a million")


def _size_of(operator: str, left: Any, right: Any) -> int:
    """The characters of the text, or 16 for each item of the list, that an operator would make; 0 of a number.

    Raises:
        TemplateLimitError: for a whole number of too many digits.
    """
    if operator == "*":
        for sequence, number in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(number, int):
                return max(0, number) * _size(sequence)
    if operator == "+":
        return _size(left) + _size(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _BITS:
            raise TemplateLimitError("it computes a whole number of more than 300,000 digits")
    return 0


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else 16 * len(value) if isinstance(value, list | tuple) else 0
