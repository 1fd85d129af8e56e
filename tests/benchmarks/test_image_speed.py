"""benchmarks/image_speed.py: its table, results that it goes on with, and a run on drawn pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.image_speed import lines_of, table
from tests.helpers.processes import run_forked

FIGURES = {"tokens_per_second": 12_000.0, "longest_step_seconds": 1.0, "peak_gib": 50.0, "first_loss": 12.0}
RESULTS = {
    ("mix", "packed"): FIGURES | {"tflops": 600.0, "waited": 0.01},
    ("mix", "TRL, 1 x 4"): FIGURES | {"tokens_per_second": 6_000.0},
    ("mix", "TRL, 4 x 1, recomputing"): FIGURES | {"tokens_per_second": 4_000.0},
    ("mix", "padded"): {"failed": "exit 1"},
}


def test_runs_are_compared_with_the_fastest_form_of_trl() -> None:
    lines = list(table(list(lines_of(["mix"], with_peers=True)), RESULTS))[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[1:5] for row in cells] == [
        ["packed", "12,000", "2.00", "600"],
        ["TRL, 1 x 4", "6,000", "1.00", "300"],
        ["padded", "exit 1"],
        ["TRL, 4 x 1, recomputing", "4,000", "0.67", "200"],
    ]


@pytest.mark.slow
def test_a_tiny_model_trains_both_ways_and_lines_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    results = tmp_path / "images.jsonl"
    command = ["-m", "benchmarks.image_speed", "--results", str(results), "--workloads", "tiny"]
    command += ["--no_peers", "--compile", "False", "--steps", "6", "--workers", "0"]
    first, second = (run_forked(command) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    written = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["tool"] for line in written] == ["packed", "padded"]
    # Random weights have the loss of a guess, however samples are laid out.
    assert written[0]["first_loss"] == pytest.approx(written[1]["first_loss"], abs=0.2)
    assert "$" not in second.stdout
