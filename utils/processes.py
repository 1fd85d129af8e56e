"""Names processes, so that one is told from all others: by machine, id, and start by a clock that nobody can set."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import psutil


def started_at(process: int) -> float:
    """A number that tells a process from a later one with the same id, for as long as the machine runs.

    On Linux it is counted from the machine's start. psutil's time since the epoch changes if the clock is set.

    Raises:
        psutil.Error: if there is no such process, or it may not be looked at.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return float(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5); the name in field 2 may hold spaces
    except (OSError, IndexError):
        return psutil.Process(process).create_time()


def machine() -> str:
    """Names the machine since it was started, and the namespace of its processes: containers have their own."""
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)
