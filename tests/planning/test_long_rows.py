"""Plans of long rows beside runs of one and two H100s or H200s (torch 2.11, from 26 November 2026 on;
docs/long-rows.md).

benchmarks/long_rows.py measures them, and writes lines of this form.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import finetuning
from benchmarks.long_rows import plan_words, read_lines
from benchmarks.runs.shapes import make_shape
from utils.units import GIB

LINES = read_lines(Path(__file__).parent / "long_rows.csv")
MEASURED = [line for line in LINES if not line["allocator"] and line["ended"] != "out of memory"]
"""One that was killed in its first step was in the first layers of backward, where the peak is, or beyond."""
REUSED_UNTIL = "2026-11-27"
"""Rows of earlier days ran with a dead tensor, as wide as hidden states, at their peak, which plans had, too
(policies/tiling/compiled.py, `AROUND_TILES`)."""
REUSED_BYTES = 2 * 4096  # per token of a rank, in bf16, of all shapes here
NUM_LOOSE = 1
"""How many peaks may be more than 5 % off the plan."""


@pytest.mark.slow
@pytest.mark.long
def test_plans_have_the_peaks_and_the_seconds_that_were_measured(tmp_path: Path) -> None:
    plans = {line["row"]: plan_of(line, tmp_path) for line in MEASURED}
    planned = {line["row"]: plans[line["row"]]["peak_gib"] + held_then_gib(line) for line in MEASURED}
    peaks = {line["row"]: planned[line["row"]] / float(line["peak_gib"]) - 1 for line in MEASURED}
    assert [row for row, apart in peaks.items() if abs(apart) > 0.1] == [], peaks
    assert sum(abs(apart) > 0.05 for apart in peaks.values()) <= NUM_LOOSE, peaks
    timed = [line for line in MEASURED if line["seconds"]]
    seconds = {line["row"]: plans[line["row"]]["seconds_per_step"] / float(line["seconds"]) - 1 for line in timed}
    assert [row for row, apart in seconds.items() if abs(apart) > 0.15] == [], seconds


def held_then_gib(line: dict[str, str]) -> float:
    """What the code that ran this row held at its peak, and today's does not."""
    words = line["flags"]
    was_there = line["date"] < REUSED_UNTIL and "--compile" in words and "--tile_tokens 8192" in words
    is_adapted = "all-linear" in words
    return int(line["tokens"]) / int(line["sharing"]) * REUSED_BYTES / GIB if was_there and is_adapted else 0.0


def plan_of(line: dict[str, str], folder: Path) -> dict[str, float]:
    model, plan = folder / line["shape"], folder / "plan.json"
    if not model.exists():
        make_shape(model, line["shape"])
    assert finetuning.main(plan_words(line, model, plan)) == 0
    found: dict[str, float] = json.loads(plan.read_text())
    return found
