"""Identifies a process among all others: by machine, id, and start by a clock that nobody can set."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import psutil


def started_at(process: int) -> float:
    """When a process started. A later process with the same id has another number, as long as the machine runs.

    On Linux it counts from the machine's start, since psutil's time since the epoch changes when the clock is set.

    Raises:
        psutil.Error: if there is no such process, or it may not be looked at.
    """
    # docs/decisions.md, "No decision rests on a clock that can be set".
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return float(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5); the name in field 2 may hold spaces
    except (OSError, IndexError):
        return psutil.Process(process).create_time()


def machine() -> str:
    """A name of the machine since its last boot, and of the namespace of processes: containers have their own."""
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)
