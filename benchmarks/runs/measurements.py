"""What several benchmarks read: the events of a run, and the memory of a process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MIB = 2**20
WARMUP_STEPS = 5


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """The events in metrics.jsonl, without a last line that a killed run left incomplete; empty if there is no file."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_events(run_folder: Path) -> list[dict[str, Any]]:
    """The events of training steps."""
    return [event for event in read_events(run_folder) if event["event"] == "train"]


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process, without pages of files; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
