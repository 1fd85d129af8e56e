"""benchmarks/long_rows.py: lines of rows, on a CPU with a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.long_rows import (
    COLUMNS,
    LongRows,
    append_line,
    beside_plan,
    how_ended,
    measured,
    read_lines,
    without_a_step,
)
from benchmarks.matrix.run_workers import RankEnd
from benchmarks.runs.launch import ROOT, UNCOMPILED
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


def test_a_row_that_ran_out_of_memory_or_time_before_a_step_has_a_line_of_its_fullest_moment(tmp_path: Path) -> None:
    peaks = [{"seconds": 9.0, "peak_gib": 70.0 + rank, "reserved_gib": 72.0, "host_gib": 5.0 - rank} for rank in (0, 1)]
    full = [RankEnd(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", {}, peaks[0])]
    killed = [RankEnd(-signal.SIGKILL, "", {}, found) for found in peaks]
    failed = [RankEnd(1, "RuntimeError: shapes", {}, peaks[0])]
    ended = [how_ended(ends, tmp_path) for ends in (full, killed, failed, [RankEnd(0, "out of memory", {}, {})])]
    (tmp_path / "oom.json").write_text("{}")
    assert how_ended(failed, tmp_path) == "out of memory"
    assert ended == [
        "out of memory",
        "killed",
        "failed",
        "",
    ]
    values = without_a_step("killed", killed)
    assert values == {
        "steps": 0,
        "peak_gib": 71.0,
        "reserved_gib": 72.0,
        "host_gib": 5.0,
        "first_seconds": "",
        "seconds": "",
    }
    assert "71.00 GiB, 71.00 planned" in beside_plan(values, {"peak_gib": 71.0})
    assert without_a_step("failed", failed) is None


def test_a_file_with_fewer_columns_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("row,allocator,steps\nold,,3\n")
    append_line(path, {"row": "new", "allocator": "", "steps": 2, "date": "2026-11-27", "ended": ""})
    assert [line["row"] for line in read_lines(path)] == ["old", "new"]
    assert path.read_text().endswith("new,,2\n")


def test_a_timeout_around_it_leaves_no_process_and_the_rows_that_were_done(tmp_path: Path) -> None:
    script = (
        "import benchmarks.long_rows as long_rows\n"
        "from tests.benchmarks.test_long_rows import TINY\n"
        "long_rows.LONG_ROWS.clear(); long_rows.LONG_ROWS.update(TINY | {'long': TINY['tiny']})\n"
        "long_rows.main(['--results', 'rows.csv', '--rows', 'all', '--steps', '100000'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (started := [*tmp_path.glob("*/peaks-0.json")]) and time.monotonic() < deadline:
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert started
        assert children
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert (len(gone), alive) == (len(children), [])
    assert not [*tmp_path.glob("tmp*")], "its folder is removed"


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
