"""The contents of lock.json: which run holds a folder, and whether its process lives."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from run_folder.run_yaml import now
from utils.processes import machine, started_at


@dataclass(frozen=True)
class Owner:
    """The run that holds a folder, as lock.json names it. No fields may be added, since earlier versions read it."""

    host: str
    process: int
    process_start: float  # see utils.processes.started_at
    machine: str  # processes of equal machines can see each other
    since: str
    token: str

    @classmethod
    def of_this_process(cls, token: str) -> Owner:
        process = os.getpid()
        return cls(
            host=socket.gethostname(),
            process=process,
            process_start=started_at(process),
            machine=machine(),
            since=now(),
            token=token,
        )

    def __str__(self) -> str:
        return f"a run on {self.host} (process {self.process}, since {self.since})"

    def is_alive(self) -> bool | None:
        """Whether the process lives; None if it cannot be looked at: on another machine, or another user's here.

        A process never blocks itself: its earlier run has ended.
        """
        if self.machine != machine():
            return None
        try:
            is_same = abs(started_at(self.process) - self.process_start) < 0.5
            # A zombie writes no more, but keeps its number until its parent has asked for its status.
            is_zombie = psutil.Process(self.process).status() == psutil.STATUS_ZOMBIE
            return is_same and not is_zombie and self.process != os.getpid()
        except psutil.AccessDenied:
            return None
        except psutil.NoSuchProcess:
            return None if psutil.pid_exists(self.process) else False


@dataclass(frozen=True)
class LockState:
    owner: Owner | None  # None while it is being written
    touched_at: int  # in nanoseconds, by the file server's clock


def read_lock(path: Path) -> LockState | None:
    """The file's contents; None if there is none. It is opened each time, for NFS then asks the server."""
    try:
        with open(path, encoding="utf-8") as file:
            touched_at = os.fstat(file.fileno()).st_mtime_ns
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        values: dict[str, Any] = json.loads(text)
        return LockState(Owner(**values), touched_at)
    except (ValueError, TypeError):
        return LockState(None, touched_at)
