"""A chat's two ends: lines that a person types or a pipe brings, and the answer as it is written."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from utils.printing import printable

QUOTES = '"""'  # around a message of several lines


class Input:
    """Messages from standard input: a line each, or several lines between two `\"\"\"`.

    Attributes:
        is_terminal: a person types them, at a prompt and with the keys of readline.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # a Python built without it
                import readline  # noqa: F401 (`input` uses it)

    def message(self) -> str | None:
        """The next message; None at the end.

        Raises:
            KeyboardInterrupt: at Ctrl-C.
        """
        line = self._line("> ")
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        first = line.lstrip().removeprefix(QUOTES)
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES):
            line = self._line("... ")
            if line is None:
                break
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if not self.is_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None


class AnswerPrinter:
    """Prints an answer as it is written, without white space around it. Ctrl-C ends the answer (`tasks.listening`)."""

    def __init__(self) -> None:
        self._pending, self._has_printed, self._stops = "", False, False
        self._shows_controls = sys.stdout.isatty()  # a terminal would obey them

    def hear(self, text: str) -> None:
        text = self._pending + (text if self._has_printed else text.lstrip())
        shown = text.rstrip()
        self._pending = text[len(shown) :]
        if shown:
            self._has_printed = True
            print(printable(shown) if self._shows_controls else shown, end="", flush=True)

    def stops(self) -> bool:
        return self._stops

    @contextlib.contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """A context in which the first Ctrl-C ends the answer after the next token, and a second one at once."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:  # ignored, as in processes that a shell starts in the background
            yield
            return

        def stop(*_: Any) -> None:
            self._stops = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
