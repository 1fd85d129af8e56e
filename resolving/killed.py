"""Why an earlier session of a run ended without an `end` event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reporting.events import Event, events_in, number
from run_folder.run_yaml import NAME, read_run_yaml
from utils.host_memory import HostMemory, killed_since
from utils.processes import machine
from utils.small_files import open_regular


def how_it_was_killed(folder: Path) -> list[str]:
    """A line on the last session in a run folder if it wrote no end, since a killed process cannot.

    If that session was on this machine, or in this container, and neither was restarted, the kernel tells whether it
    killed the session for lack of memory.
    """
    events = _events(folder / "metrics.jsonl")
    run = read_run_yaml(folder) if (folder / NAME).is_file() else {}
    if not events or not run or events[-1]["event"] == "end":
        return []
    step = max((event["step"] for event in events if event["event"] == "train"), default=0)
    residents = {e["rank"]: number(e.get("host_rss_gib")) for e in events if e["event"] == "memory"}
    last_seen = ", ".join(f"rank {rank} {gib:.2f} GiB" for rank, gib in sorted(residents.items()) if gib is not None)
    line = f"resume: the session before ended without a word after step {step}"
    killed = killed_since(_memory_of(run)) if run.get("machine") == machine() else ""
    guess = ", as if it was killed (exit status -9 or 137), its disk was full, or the machine stopped"
    line += f": {killed}" if killed else guess
    return [f"{line}; host memory of its ranks when it was last measured: {last_seen}" if last_seen else line]


def _memory_of(run: dict[str, Any]) -> HostMemory | None:
    """Host memory at the session's begin, by run.yaml."""
    try:
        memory = HostMemory(**run["host_memory"])
    except (KeyError, TypeError):
        return None
    return memory if type(memory.num_kills) is int else None


def _events(file: Path) -> list[Event]:
    """The events of metrics.jsonl, as far as it can be read."""
    try:
        with open_regular(file) as lines:
            return events_in(lines)
    except OSError:
        return []
