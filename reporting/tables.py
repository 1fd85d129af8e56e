"""Prints tables and lines for people, in a terminal and in a log file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from utils.printing import printable

LOG_WIDTH = 110  # in characters; a log file has no width of its own


def table_of(rows: dict[str, str]) -> Table:
    """A table of two columns: subjects and texts."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for subject, text in rows.items():
        table.add_row(subject, printable(text))
    return table


def print_for_people(*parts: Any, console: Console | None = None) -> None:
    """Print tables and lines; to a log file as plain text, LOG_WIDTH wide."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    for part in parts:
        is_line = isinstance(part, str)
        # No markup: brackets in a path or a message are text. A line is never broken, for grep.
        console.print(printable(part) if is_line else part, markup=False, soft_wrap=is_line)


def value_range(values: Iterable[float], form: str = "g") -> str:
    """ "3.9 to 4.1", or "4.1" if all are equal."""
    values = list(values)
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
