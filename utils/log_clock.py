"""The time of day in front of each line of a run's log, and the date at its start and at midnight."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime

_CLOCK = "log_clock"  # an attribute of the stream that the log goes to


class LogClock:
    """Puts the time before lines. A line of its own has the date, before the first of a day."""

    def __init__(self) -> None:
        self._day: date | None = None  # of the last line

    def stamped(self, line: str) -> list[str]:
        """The line with its time; of a table, in one text, the first line has it."""
        now = datetime.now().astimezone()
        before, self._day = self._day, now.date()
        lines = [line] if self._day == before else [f"{self._day} {now.tzname()}", line]
        return [f"{now:%H:%M:%S} {line}" for line in lines]


@contextmanager
def timed_log() -> Iterator[None]:
    """A context in which lines of this process's standard output begin with the time; tables and errors do not."""
    stream = sys.stdout
    setattr(stream, _CLOCK, LogClock())
    try:
        yield
    finally:
        delattr(stream, _CLOCK)


def stamped(line: str) -> list[str]:
    """The lines to print for a line of the log: with the time if this is a `timed_log`."""
    clock = getattr(sys.stdout, _CLOCK, None)
    return [line] if clock is None or not line else clock.stamped(line)
