"""plan.json in the run folder: what was planned for the run that wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planning.data_facts import DataFacts
from planning.planned_environment import own_hardware
from planning.planned_run import plan_of
from planning.resolved import Resolved
from reporting.run_folder import PLAN
from utils.environment import Environment
from utils.errors import in_one_line


def plan_at_start(resolved: Resolved, env: Environment, data: DataFacts) -> tuple[dict[str, Any] | None, list[str]]:
    """The plan of the run that starts on these ranks, in closed form; and lines to print: why there is none.

    It draws no random numbers that the run would miss: a run is seeded after it.
    """
    config = resolved.config
    try:
        return plan_of(config, own_hardware(config.train_config, config.planning_config, env), data).to_dict(), []
    except Exception as error:  # a plan is worth no run
        return None, [f"{PLAN}: not written, since this run could not be planned ({in_one_line(error)})"]


def write_plan(folder: Path, plan: dict[str, Any] | None) -> None:
    """Write the plan into the run folder; without one, nothing is there."""
    if plan is not None:
        (folder / PLAN).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
