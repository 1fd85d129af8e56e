"""Memory that runs out on a CPU: the host is the device, so the remedies are those of the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runs import random_rows
from tests.helpers.little_memory import with_little_memory
from tests.helpers.processes import ProcessGroup
from tests.helpers.refusals import error_lines


def test_smaller_micro_batches_and_checkpointing_are_advised_with_what_they_save(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROW_LENGTH", "1000")
    monkeypatch.setenv("NUM_ROWS", "64")
    argv = ["--model_name", str(tiny_model), "--output_dir", str(tmp_path / "run"), "--max_train_step", "2"]
    argv += ["--dataset", f"{random_rows.__file__}:get_rows", "--context_length", "1000"]
    argv += ["--batch_size_training", "64", "--run_validation", "False", "--num_workers_dataloader", "0"]
    (outcome,) = process_group.run(with_little_memory(argv, 600), 1)
    assert outcome.status == 1, outcome.stderr
    (line,) = error_lines(outcome.stderr)
    assert "out of host memory: rank 0 of 1" in line
    assert "Traceback" not in outcome.stderr
    changes = json.loads((tmp_path / "run/oom.json").read_text())["changes"]
    assert any("--batch_size_training" in change["flags"] for change in changes), changes
    assert all(change["saves_gib"] > 0 for change in changes)
    words = {word for change in changes for word in change["flags"]}
    assert not words & {"--num_workers_dataloader", "--async_save", "--optimizer_cpu_offload"}
