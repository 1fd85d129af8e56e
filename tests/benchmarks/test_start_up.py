"""benchmarks/start_up.py: parts of a start add up to it, and the state of the caches is what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.runs.start_parts import PROBE, PartsOfStart
from benchmarks.start_up import forget, mebibytes_in, share_cached, start, table
from tests.helpers.processes import ROOT


def test_each_moment_belongs_to_one_part_and_compiling_is_its_own_unless_the_probe_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, compiled = [10.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def work(seconds: float, compiling: float = 0.0) -> None:
        clock[0] += seconds
        compiled[0] += compiling

    parts = PartsOfStart(5.0, lambda: compiled[0])
    parts.enter("other")
    planning = parts.timed("planning", work)
    probe = parts.timed(PROBE, work)

    def tries() -> None:
        work(1.0, compiling=0.75)
        planning(2.0)

    parts.timed("probing, all else", tries)()
    probe(4.0, compiling=3.0)
    work(0.5)
    parts.enter("first step")
    work(9.0, compiling=6.0)
    parts.enter("later steps")
    found = parts.table(5.0, [clock[0], clock[0] + 1.5, clock[0] + 3.0])
    wanted = {"imports": 5.0, "planning": 2.0, PROBE: 4.0, "probing, all else": 0.25, "compiling": 6.75, "other": 0.5}
    wanted |= {"reading": 0.0, "building": 0.0, "first kernels": 1.5, "a later step": 1.5}
    totals = {"to the end of step 1": 21.5, "to the end of step 3": 24.5}
    assert found == wanted | totals
    assert sum(wanted.values()) == totals["to the end of step 1"]


def test_the_table_has_the_caches_first() -> None:
    columns = [{"imports": 5.0, "other": 0.5}, {"imports": 4.0, "other": 0.25}]
    lines = table(columns, {"files cached before": ["3 %", "100 %"]}).splitlines()
    assert lines[2:] == [
        "| files cached before | 3 % | 100 % |",
        "| imports | 5.00 | 4.00 |",
        "| other | 0.50 | 0.25 |",
    ]


def test_the_command_itself_keeps_no_library_of_a_run_in_memory() -> None:
    """Their files could not be dropped from the system's cache, so no start would be cold."""
    loaded = (
        "import sys, benchmarks.start_up; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_leave_the_systems_cache(tmp_path: Path) -> None:
    file = tmp_path / "library.so"
    file.write_bytes(bytes(1 << 20))
    os.sync()
    before = share_cached([file])
    if before is None:
        pytest.skip("this file system does not say what is cached")
    assert before == 1.0
    forget([file])
    assert share_cached([file]) == 0.0
    assert mebibytes_in(tmp_path) == 1.0


@pytest.mark.slow
def test_a_start_is_measured_and_ends_after_its_third_step(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--model_name", str(tiny_model), "--random_weights", "--run_validation", "False", "--context_length", "64"]
    flags += ["--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:get_rows", "--max_train_step", "100"]
    environment = os.environ | {"ROW_LENGTH": "64", "NUM_ROWS": "32", "OMP_NUM_THREADS": "1"}
    found = start([*flags, "--output_dir", str(tmp_path / "run")], tmp_path / "parts.json", environment)
    *parts, first, third = found
    assert (first, third) == ("to the end of step 1", "to the end of step 3")
    assert sum(found[part] for part in parts) == pytest.approx(found[first], abs=0.05)
    assert found["compiling"] == found[PROBE] == 0.0
    assert min(found["imports"], found["reading"]) > 0.0
