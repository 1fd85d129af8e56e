"""benchmarks/start_up.py: a part is what a function of prepare() took; short ones are put together."""

from __future__ import annotations

import time
from types import SimpleNamespace

from benchmarks.runs.start_parts import PartsOfStart
from benchmarks.start_up import table
from utils.wording import plural


def test_calls_of_imported_functions_are_timed_by_their_names() -> None:
    parts, module = PartsOfStart(), SimpleNamespace(__name__="somewhere", plural=plural, PartsOfStart=PartsOfStart)
    parts.watch_functions(module)
    assert module.plural(2, "rank") == "2 ranks"
    assert module.PartsOfStart is PartsOfStart
    assert list(parts.seconds) == ["plural()"]
    parts.timed("sleep", time.sleep)(0.01)
    parts.timed("sleep", time.sleep)(0.01)
    assert parts.seconds["sleep"] >= 0.02


def test_a_part_that_is_short_in_every_start_is_other() -> None:
    starts = [{"imports": 5.0, "build()": 0.01, "other": 0.5}, {"imports": 4.0, "other": 0.5}]
    lines = table([*starts, *({"imports": 1.0, "other": 0.5} for _ in range(2))]).splitlines()
    assert lines[2:] == ["| imports | 5.00 | 4.00 | 1.00 | 1.00 |", "| other | 0.51 | 0.50 | 0.50 | 0.50 |"]
