"""Where a rank's main thread is, how long it may take there, and for how long it has not moved."""

from __future__ import annotations

import time
from dataclasses import dataclass

from supervision.patience import USUAL, Patience


@dataclass(frozen=True)
class Position:
    """Where the main thread is. Compared by identity: a new object means that it has moved."""

    step: int  # 0 before the first one
    activity: str  # "training": inside that step; anything else may take long
    since: float

    def __str__(self) -> str:
        if self.activity == "training":
            return f"in step {self.step}"
        return f"while {self.activity}" + (f" after step {self.step}" if self.step else "")


class MainThread:
    """Written by the main thread, in about a microsecond, and read by the watchdog."""

    def __init__(self, step_timeout_seconds: int | None = None, patience: Patience = USUAL) -> None:
        self.position = Position(0, "loading", time.monotonic())
        self.patience = patience
        self._asked = step_timeout_seconds
        self._first_step, self._longest_step = 0, 0.0

    def at(self, step: int, activity: str) -> None:
        """Note where the main thread is now."""
        now, old = time.monotonic(), self.position
        if old.activity == "training":
            self._longest_step = max(self._longest_step, now - old.since)
        if activity == "training":
            self._first_step = self._first_step or step
        self.position = Position(step, activity, now)

    def limit_seconds(self) -> float:
        """How long it may stay where it is: short inside a step, once a whole one has shown how long they take."""
        at, longest = self.position, self.patience.long_seconds
        # The first step after loading may compile, which takes minutes.
        if at.activity != "training" or at.step <= self._first_step or self._asked == 0:
            return longest
        return self._asked or min(max(self.patience.step_seconds, 3 * self._longest_step), longest)


class Stillness:
    """Measures for how long a position has not changed. It is asked every `interval_seconds`.

    A much longer pause between two calls counts little: then this whole process was stopped, and will go on.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._most_per_call = 2 * interval_seconds
        self._seen: Position | None = None
        self._called_at = self._seconds = 0.0

    def seconds(self, position: Position) -> float:
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._called_at, self._most_per_call) if position is self._seen else 0
        self._seen, self._called_at = position, now
        return self._seconds
