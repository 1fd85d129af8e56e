"""plan.json is written if the run can be planned; if not, the run goes on and a line says why."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import finetuning
from configs.flags import parse_flags
from planning.data_facts import DataFacts
from planning.plan_file import plan_at_start, write_plan
from planning.resolved import Resolved, resolve
from tests.helpers.generated import flags
from tests.helpers.processes import ProcessGroup
from utils.environment import lone_process


@pytest.fixture
def resolved(tiny_model: Path) -> Resolved:
    return resolve(parse_flags(["--model_name", str(tiny_model), "--batching_strategy", "padding"]), lone_process())


def test_it_holds_the_plan_in_closed_form(resolved: Resolved, tmp_path: Path) -> None:
    plan = plan_at_start(resolved, lone_process(), DataFacts())
    write_plan(tmp_path, plan.values)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert (written["made_by"], written["hardware"], written["world_size"]) == ("closed form", "1xCPU", 1)
    assert not plan.notes


def test_a_run_that_cannot_be_planned_goes_on_and_says_so(resolved: Resolved, tmp_path: Path) -> None:
    plan = plan_at_start(resolved, lone_process(), DataFacts(lengths=(np.array([]),)))
    write_plan(tmp_path, plan.values)
    assert plan.notes[0].startswith("plan.json: not written, since this run could not be planned (")
    assert not list(tmp_path.iterdir())


def test_rank_0_alone_reads_the_speeds_that_it_plans_with(
    tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    speeds = {
        name: {"latency_seconds": 1e-4, "seconds_per_byte": 1e-9}
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }
    groups = {"world": {"size": 2, **speeds}, "node": {"size": 2, **speeds}, "between": {"size": 1, **speeds}}
    (tmp_path / "speeds.json").write_text(json.dumps({"speeds": groups}))
    argv = flags(tiny_model, samples, tmp_path / "run", "--enable_fsdp", "--max_train_step", "1")
    outcomes = process_group.run(partial(_with_own_speeds, argv, tmp_path), 2)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[1].stderr


def _with_own_speeds(argv: list[str], folder: Path) -> int:
    """A run whose other ranks, on a machine of their own, do not have the file."""
    name = "speeds.json" if os.environ["RANK"] == "0" else "not_copied.json"
    return finetuning.main([*argv, "--network_speeds", str(folder / name)], ends_process=True)
