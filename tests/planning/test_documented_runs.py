"""The plans of runs that others have documented: whether they fitted, and what they held after forward."""

from __future__ import annotations

import statistics

import pytest

from planning.memory.memory_plan import MemoryPlan
from reporting.tables import print_for_people
from tests.helpers.documented_systems import Run, documented_runs, plan_of_run
from tests.helpers.processes import ROOT

PAGE = ROOT / "docs/planning.md"
MOST_MISSED = 4
EXCEPTED = "L18"


def is_met(run: Run, plan: MemoryPlan) -> bool:
    return (plan.verdict == "does_not_fit") == (run["outcome"] == "CUDA_OOM")


def line(run: Run, plan: MemoryPlan) -> str:
    """A row of the table in docs/planning.md."""
    measured = run.measured_gib
    after = "" if measured is None else f"{plan.after_forward_gib:.1f} / {measured:.1f} GiB ({off(run, plan):+.0%})"
    what = f"{run['model']} {run['method'].split()[0]} {run['precision'].split()[0].split('(')[0]} {run['optimizer']}"
    shape = f"{run['micro_bs'].split()[0]} x {run['grad_acc'].split()[0]}"
    cards = f"{run['n_gpus']} x {run['gpu']}"
    outcome = "OOM" if run["outcome"] == "CUDA_OOM" else "fits"
    verdict = plan.verdict.replace("_", " ") + ("" if is_met(run, plan) else " **(missed)**")
    cells = (run.name, what, shape, cards, run["strategy"], outcome, verdict, f"{plan.peak_gib:.1f}", after)
    return f"| {' | '.join(cells)} |"


def off(run: Run, plan: MemoryPlan) -> float:
    assert run.measured_gib is not None
    return plan.after_forward_gib / run.measured_gib - 1


@pytest.mark.slow
def test_plans_meet_what_documented_runs_did() -> None:
    runs = [run for run in documented_runs() if run["outcome"] in ("CUDA_OOM", "fits")]
    planned = [(run, plan_of_run(run)) for run in runs]
    print_for_people("", *(line(run, plan) for run, plan in planned))
    missed = [run.name for run, plan in planned if not is_met(run, plan)]
    errors = {run.name: abs(off(run, plan)) for run, plan in planned if run.measured_gib is not None}
    assert (len(runs), len(errors)) == (79, 9)
    assert len(missed) <= MOST_MISSED, missed
    page = PAGE.read_text()
    assert all(f"| {name} |" in page and f"**{name}" in page for name in missed), missed  # explained one by one
    assert [name for name, error in errors.items() if error > 0.12] in ([], [EXCEPTED])
    assert statistics.median(error for name, error in errors.items() if name != EXCEPTED) < 0.06
