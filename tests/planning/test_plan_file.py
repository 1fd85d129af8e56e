"""plan.json is written if the run can be planned; if not, the run goes on and a line says why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from configs.flags import parse_flags
from planning.data_facts import DataFacts
from planning.plan_file import plan_at_start, write_plan
from planning.resolved import Resolved, resolve
from utils.environment import lone_process


@pytest.fixture
def resolved(tiny_model: Path) -> Resolved:
    return resolve(parse_flags(["--model_name", str(tiny_model), "--batching_strategy", "padding"]), lone_process())


def test_it_holds_the_plan_in_closed_form(resolved: Resolved, tmp_path: Path) -> None:
    plan, _, notes = plan_at_start(resolved, lone_process(), DataFacts())
    write_plan(tmp_path, plan)
    written = json.loads((tmp_path / "plan.json").read_text())
    assert (written["made_by"], written["hardware"], written["world_size"]) == ("closed form", "1xCPU", 1)
    assert not notes


def test_a_run_that_cannot_be_planned_goes_on_and_says_so(resolved: Resolved, tmp_path: Path) -> None:
    plan, _, notes = plan_at_start(resolved, lone_process(), DataFacts(lengths=(np.array([]),)))
    write_plan(tmp_path, plan)
    assert notes[0].startswith("plan.json: not written, since this run could not be planned (")
    assert not list(tmp_path.iterdir())
