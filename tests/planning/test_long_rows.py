"""Plans of long rows beside runs of one H100 80GB (torch 2.11, 26 November 2026; docs/long-rows.md)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import finetuning
from benchmarks.runs.shapes import make_shape
from benchmarks.training_speed import LONG_QLORA

with (Path(__file__).parent / "long_rows.csv").open() as table:
    MEASURED = list(csv.DictReader(table))


@pytest.mark.slow
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["row"])
def test_a_plan_has_the_peak_and_the_seconds_that_were_measured(row: dict[str, str], tmp_path: Path) -> None:
    make_shape(tmp_path / "model", "llama8b-long")
    words = ["--model_name", str(tmp_path / "model"), *LONG_QLORA, *row["flags"].split()]
    words += ["--context_length", row["tokens"], "--batch_size_training", "1", "--dry_run"]
    words += ["--dry_run_hardware", "1xH100-80GB", "--dry_run_json", str(tmp_path / "plan.json")]
    assert finetuning.main(words) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["peak_gib"] == pytest.approx(float(row["peak_gib"]), rel=0.1)
    assert plan["seconds_per_step"] == pytest.approx(float(row["seconds"]), rel=0.1)
