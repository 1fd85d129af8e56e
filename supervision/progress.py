"""Where a rank's main thread is, how long it may take there, and for how long it has not moved."""

from __future__ import annotations

import time
from dataclasses import dataclass

# What may take long on a healthy run: a whole model read or written, an evaluation, a first step that compiles.
LONG_SECONDS = 3600
_STEP_SECONDS = 300  # where --step_timeout_seconds is not given


@dataclass(frozen=True)
class Position:
    """Compared by identity: a new one means that the main thread has moved."""

    step: int  # 0 before the first one
    activity: str  # "training": inside that step; anything else may take long
    since: float

    def __str__(self) -> str:
        if self.activity == "training":
            return f"in step {self.step}"
        return f"while {self.activity}" + (f" after step {self.step}" if self.step else "")


class Progress:
    """Written by the main thread, in about a microsecond, and read by the watchdog."""

    def __init__(self, step_timeout_seconds: int | None = None) -> None:
        self.position = Position(0, "loading", time.monotonic())
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
        """Short inside a step, once a whole one has shown how long they take; long elsewhere."""
        at = self.position
        if at.activity != "training" or at.step <= self._first_step or self._asked == 0:
            return LONG_SECONDS
        return self._asked or min(max(_STEP_SECONDS, 3 * self._longest_step), LONG_SECONDS)


class Stillness:
    """How long a position has not changed, over calls every `interval_seconds`.

    A longer pause between two calls counts little: then this whole process was stopped, and will go on.
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
