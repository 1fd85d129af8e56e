"""Prints lines with words of any origin: data, file names, models, errors of other libraries."""

from __future__ import annotations

import re
import sys

from utils.log_clock import stamped
from utils.urls import without_secrets

# Control characters except line feed and tab; line separators; marks that change the direction of text; surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters shown, such as \x1b, which a terminal obeys, and secrets in URLs masked."""
    shown = _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
    return without_secrets(shown)


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a line at once. Those to standard output are lines of the log (`utils.log_clock`)."""
    for line in [text] if to_stderr else stamped(text):
        print(printable(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)
