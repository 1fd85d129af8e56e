"""Planned and measured memory: both in plan.json, and a difference names its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planning.against_run import compare_with_plan
from planning.memory.memory_plan import MemoryPlan, Parts
from tests.helpers.limited_files import files_limited_to

PLAN = MemoryPlan(
    phases={
        "forward": Parts(params=4.0, optimizer=8.0, activations=2.0, temporaries=0.5),
        "backward": Parts(params=4.0, grads=4.0, optimizer=8.0, activations=1.0, temporaries=1.0),
        "optimizer_step": Parts(params=4.0, grads=4.0, optimizer=8.0),
    },
    after_forward_gib=14.0,
    overhead_gib=1.0,
    capacity_gib=24.0,
    host_load_gib=1.0,
    host_training_gib=1.0,
    checkpoint_gib=12.0,
)


def memory(phase: str, **figures: float) -> dict[str, Any]:
    zero = {"params_gib": 4.0, "grads_gib": 0.0, "optimizer_gib": 8.0, "activations_gib": 0.0}
    return {"event": "memory", "step": 2, "phase": phase} | zero | figures


def compared(folder: Path, peak_gib: float, activations_gib: float, *, has_allocator: bool = True) -> list[str]:
    (folder / "plan.json").write_text(json.dumps(PLAN.to_dict() | {"price": None}))
    events = [
        {"event": "train", "step": 1},
        memory("after_forward", activations_gib=activations_gib),
        memory("after_backward", grads_gib=4.0),
    ]
    return compare_with_plan(folder, events, [peak_gib - 1, peak_gib], has_allocator=has_allocator)


def test_both_peaks_are_shown_and_kept(tmp_path: Path) -> None:
    (line,) = compared(tmp_path, 17.5, 2.0)
    assert line == "memory planned / measured, GiB: peak 18.00 / 17.50 (+2.9 %), planned in backward"
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["peak_gib"] == 18.0
    assert plan["measured"] == {
        "peak_gib": 17.5,
        "params_gib": 4.0,
        "grads_gib": 4.0,
        "optimizer_gib": 8.0,
        "activations_gib": 2.0,
        "other_gib": pytest.approx(17.5 - 4 - 4 - 8 - 2 * 0.5),  # half of the activations are left at the planned peak
    }


@pytest.mark.parametrize(
    ("peak_gib", "activations_gib", "part"),
    [(22.0, 10.0, "activations 2.00 / 10.00"), (25.0, 2.0, "other 1.00 / 8.00")],
)
def test_a_difference_above_a_tenth_says_where_it_lies(
    peak_gib: float, activations_gib: float, part: str, tmp_path: Path
) -> None:
    _, line = compared(tmp_path, peak_gib, activations_gib)
    name = part.split()[0]
    assert line.startswith(f"the plan is more than 10 % off; most of it lies in {name}: {part}, ")


def test_on_a_cpu_resident_memory_is_compared_with_all_that_was_planned_for_the_process(tmp_path: Path) -> None:
    (line,) = compared(tmp_path, 20.0, 0.0, has_allocator=False)
    assert line == (
        "memory planned / measured, GiB: resident 19.00 / 20.00 (-5.0 %), planned in backward; "
        "params 4.000 / 4.000, grads 4.000 / 4.000, optimizer 8.000 / 8.000"
    )
    measured = json.loads((tmp_path / "plan.json").read_text())["measured"]
    assert (measured["params_gib"], measured["resident_gib"]) == (4.0, 20.0)
    assert (measured["peak_gib"], measured["other_gib"]) == (None, None)


def test_an_event_without_its_figures_is_read_past(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN.to_dict() | {"price": None}))
    events = [{"event": "memory", "step": 1}, memory("after_backward") | {"activations_gib": None}]
    (line,) = compare_with_plan(tmp_path, events, [17.5], has_allocator=True)
    assert line.startswith("memory planned / measured, GiB: peak 18.00 / 17.50 (+2.9 %)")


def test_a_disk_that_refuses_keeps_the_plan_and_the_figures_are_said(tmp_path: Path) -> None:
    before = compared(tmp_path, 17.5, 2.0)
    planned = (tmp_path / "plan.json").read_text()
    with files_limited_to(100):
        again = compare_with_plan(tmp_path, [memory("after_backward")], [17.5], has_allocator=True)
    assert again == before
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"plan.json": planned}


def test_without_a_plan_nothing_is_said(tmp_path: Path) -> None:
    assert compare_with_plan(tmp_path, [], [1.0], has_allocator=True) == []
    (tmp_path / "plan.json").write_text("{")
    assert compare_with_plan(tmp_path, [], [1.0], has_allocator=True) == []
