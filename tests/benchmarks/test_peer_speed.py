"""benchmarks/peer_speed.py: its table, and results that it goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peer_speed import CEILING, main, table

FIGURES = {"tokens_per_second": 12_000.0, "peak_gib": 80.0, "first_loss": 12.5}
RESULTS = {
    ("", CEILING): {"tflops": 800.0},
    ("P2", "finetuning.py"): FIGURES | {"tflops": 600.0},
    ("P2", "TRL + Liger"): FIGURES | {"tokens_per_second": 10_000.0},
    ("P2", "torchtune"): FIGURES | {"tokens_per_second": 9_000.0},
}


def test_tools_are_compared_with_the_fastest_peer_and_with_the_ceiling() -> None:
    lines = list(table([line for line in RESULTS if line[0]], RESULTS))[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[3:6] for row in cells] == [["1.200", "600", "0.75"], ["1.000", "500", "0.62"], ["0.900", "450", "0.56"]]


def test_lines_that_are_there_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.jsonl"
    kept = [{"row": row, "tool": tool} | found for (row, tool), found in RESULTS.items() if row]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert main(["--rows", "P2", "--results", str(file)]) == 0
    assert "| P2 | TRL + Liger | 10,000 | 1.000 |" in capsys.readouterr().out
    assert main(["--rows", "P2", "P6", "--results", str(file), "--minutes", "0"]) == 1
    printed = capsys.readouterr().out
    assert "| P6 | finetuning.py | not run yet |" in printed
    assert "| P6 | TRL + Liger | not run yet |" in printed
    assert "| P6 | torchtune |" not in printed
