"""The numbers of plan.json in a run folder, for those who show them beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from reporting.events import number
from run_folder.entries import PLAN


def read_plan_figures(folder: Path) -> dict[str, float]:
    """Its finite numbers by name, such as `peak_gib` and `seconds_per_step`; none if the run was not planned."""
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    values = plan.items() if isinstance(plan, dict) else ()
    return {name: figure for name, value in values if (figure := number(value)) is not None}
