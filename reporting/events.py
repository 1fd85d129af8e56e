"""Parses a line of metrics.jsonl or samples.jsonl. Another version, an editor or a failing disk may have written it.

The place of an event in the run (its name, step, epoch, rank, phase) is checked here, so readers may rely on it. Its
figures may be missing or of any type: read them with `number` and `figures`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Event = dict[str, Any]

_COUNTS = ("step", "epoch", "rank")
_PLACES = {
    "train": ("step",),
    "eval": ("step",),
    "sample": ("step",),
    "communication": ("step",),
    "memory": ("step", "rank", "phase"),
    "epoch": ("epoch",),
}
"""The keys that an event of this name must have. Other events belong to the whole run, or to a later version."""

_MOST = 2**53  # JavaScript tells whole numbers apart up to here


def event_of(line: bytes) -> Event | None:
    """The event in a line, which is a JSON object with a name and a place; None for any other line."""
    try:
        event = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    is_placed = event.keys() >= set(_PLACES.get(event["event"], ()))
    is_placed = is_placed and all(count(event[name]) is not None for name in _COUNTS if name in event)
    return event if is_placed and isinstance(event.get("phase", ""), str) else None


def events_in(lines: Iterable[bytes]) -> list[Event]:
    """The events in these lines; other lines are left out."""
    return [event for line in lines if (event := event_of(line)) is not None]


def figures(events: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The figures of this name; events without it are left out."""
    return [figure for event in events if (figure := number(event.get(name))) is not None]


def number(value: Any) -> float | int | None:
    """The value, if it is a finite number that JavaScript can hold; otherwise None."""
    # To isinstance, true and false are whole numbers. NaN fails both comparisons.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -1e100 < value < 1e100 else None


def count(value: Any) -> int | None:
    """The value, if it is a whole number from 0 on; otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None
