"""Reads the numbers of a run folder's plan.json, to show them next to measured ones."""

from __future__ import annotations

import json
from pathlib import Path

from reporting.events import number
from run_folder.entries import PLAN


def read_plan_figures(folder: Path) -> dict[str, float]:
    """The plan's finite numbers by name, such as `peak_gib` and `seconds_per_step`; empty without a plan."""
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    values = plan.items() if isinstance(plan, dict) else ()
    return {name: figure for name, value in values if (figure := number(value)) is not None}
