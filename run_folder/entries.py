"""Entries of a run folder: their names, which of them a run writes, and which are there already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_folder.run_yaml import NAME, is_cut, is_of_a_run, read_run_yaml

PLAN = "plan.json"
REPORT = "report.html"
WANDB_RUN = "wandb_run"  # the key of run.yaml that holds the id of the W&B run
_REPORT_MARK = b'<meta name="generator" content="finetuning.py report">'
CHECKPOINTS = "checkpoints"
OOM = "oom.json"  # the account of a session whose memory ran out; the next one deletes it
REPLACED = (NAME, PLAN, "metrics.jsonl", "samples.jsonl", "metrics_data.json", REPORT, "model", "adapter", OOM)
"""Entries that a resumed run replaces as a whole. It only adds to the others."""
FILES = tuple(name for name in REPLACED if name not in ("model", "adapter"))
RUN_ENTRIES = (*REPLACED, CHECKPOINTS, "tensorboard", "traces", "wandb", "profiler")


def entries_of(settings: Mapping[str, Any]) -> list[str]:
    """The names of the entries that a run with these settings writes.

    Args:
        settings: as in run.yaml, perhaps of another version.
    """
    sections = [settings.get(name) for name in ("train_config", "tracking_config")]
    train, tracking = (section if isinstance(section, dict) else {} for section in sections)
    adapts, saves = bool(train.get("use_peft")), bool(train.get("save_model"))
    written = {
        "samples.jsonl": train.get("eval_generate"),
        "metrics_data.json": tracking.get("save_metrics"),
        REPORT: tracking.get("report"),
        "model": saves and not adapts,
        "adapter": saves and adapts,
        CHECKPOINTS: not train.get("dist_checkpoint_root_folder"),
        "tensorboard": tracking.get("use_tensorboard"),
        "wandb": tracking.get("use_wandb"),
        "profiler": tracking.get("use_profiler") and not tracking.get("profiler_dir"),
    }
    return [name for name in RUN_ENTRIES if written.get(name, True)]  # every run may write those not listed here


def made_entries(folder: Path) -> list[str]:
    """The names of the entries that the run in this folder wrote, in all its sessions.

    None if the folder holds no run, or if run.yaml is cut. A report counts, whoever made it.
    """
    run = read_run_yaml(folder) if (folder / NAME).is_file() else {}
    if not is_of_a_run(run) or is_cut(run):
        return []
    recorded = run.get("entries")  # earlier versions recorded none
    made = recorded if isinstance(recorded, list) else entries_of(run["settings"])
    return [name for name in RUN_ENTRIES if name in made or (name == REPORT and is_report(folder / REPORT))]


def held_entries(folder: Path) -> list[str]:
    """The names of a run's entries that are there already, whoever made them. Empty folders do not count."""
    return [name for name in RUN_ENTRIES if os.path.lexists(folder / name) and not _is_empty_folder(folder / name)]


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and os.access(path, os.R_OK) and not any(path.iterdir())


def is_report(file: Path) -> bool:
    """Whether this is a page that `reporting.report.page.write_report` wrote."""
    if not file.is_file() or file.is_symlink():
        return False
    with open(file, "rb") as page:
        return _REPORT_MARK in page.read(2000)
