"""Reads the numbers of a run folder's plan.json, to show them next to measured ones."""

from __future__ import annotations

from pathlib import Path

from reporting.events import number
from run_folder.entries import PLAN
from utils.small_files import read_json


def read_plan_figures(folder: Path) -> dict[str, float]:
    """The plan's finite numbers by name, such as `peak_gib` and `seconds_per_step`; empty without a plan."""
    try:
        plan = read_json(folder / PLAN)
    except (OSError, ValueError):
        return {}
    values = plan.items() if isinstance(plan, dict) else ()
    return {name: figure for name, value in values if (figure := number(value)) is not None}
