"""benchmarks/long_rows.py: lines of rows, on a CPU with a tiny model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.long_rows import COLUMNS, LongRows, beside_plan, measured, read_lines
from benchmarks.runs.launch import UNCOMPILED
from benchmarks.runs.workload import LORA, Workload

TRAIN = {"event": "train", "step_seconds": 4.0}
MEMORY = {"event": "memory", "peak_allocated_gib": 7.0, "reserved_gib": 9.0, "host_rss_gib": 3.0}
TINY = {
    "tiny": Workload("tiny", 1, 64, [*LORA, *UNCOMPILED]),
    "tiny-shared": Workload("tiny", 1, 64, [*LORA, *UNCOMPILED], nproc=2, num_sharing=2),
}


def test_a_line_has_the_highest_peak_and_the_last_step() -> None:
    events = [{**TRAIN, "step_seconds": 9.0}, MEMORY, {**MEMORY, "reserved_gib": 8.0}, TRAIN]
    killed, ended = measured(events), measured([*events, {"event": "end", "peak_allocated_gib": 7.5}])
    assert killed is not None
    assert ended is not None
    assert (killed["peak_gib"], ended["peak_gib"], ended["reserved_gib"]) == (7.0, 7.5, 9.0)
    assert (ended["first_seconds"], ended["seconds"], ended["steps"]) == (9.0, 4.0, 2)


def test_one_step_has_no_seconds_of_later_steps() -> None:
    values = measured([TRAIN, MEMORY])
    assert values is not None
    assert values["seconds"] == ""
    assert "7.00 GiB, 7.70 planned (+10.0 %)" in beside_plan(values, {"peak_gib": 7.7, "seconds_per_step": 4.0})


def test_a_run_without_a_step_has_no_line() -> None:
    assert measured([{"event": "start"}]) is None


@pytest.mark.slow
def test_rows_are_run_once_each_and_in_as_many_ranks_as_share_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = LongRows(TINY, tmp_path / "rows.csv", tmp_path, "", 2, 120)
    rows.run([*TINY], time.monotonic() + 300)
    lines = read_lines(tmp_path / "rows.csv")
    assert [(line["row"], line["gpus"], line["sharing"], line["steps"]) for line in lines] == [
        ("tiny", "1", "1", "2"),
        ("tiny-shared", "2", "2", "2"),
    ]
    assert list(lines[0]) == COLUMNS
    assert all(float(line["seconds"]) > 0 for line in lines)
    assert rows.left([*TINY]) == []
    assert LongRows(TINY, tmp_path / "rows.csv", tmp_path, "expandable", 2, 120).left([*TINY]) == [*TINY]
    rows.run([*TINY], time.monotonic() + 300)
    assert read_lines(tmp_path / "rows.csv") == lines
