"""What a benchmark says of a run that failed is what the run said."""

from __future__ import annotations

from benchmarks.runs.launch import last_line, launch


def test_the_last_line_of_a_failed_run_is_its_own_error_and_not_torchruns() -> None:
    printed = launch(["--no_such_flag", "1"], 2, {"CUDA_VISIBLE_DEVICES": ""})
    assert "--no_such_flag" in last_line(printed)
