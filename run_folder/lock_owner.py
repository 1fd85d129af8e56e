"""The contents of lock.json: which run holds a folder, and whether its process lives."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from run_folder.run_yaml import now
from utils.processes import machine, started_at
from utils.small_files import open_regular, parse_json


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


_SOME_OWNER = Owner(host="", process=1, process_start=0.0, machine="", since="", token="")
_MOST_BYTES = 2**16


@dataclass(frozen=True)
class LockState:
    owner: Owner | None  # None while it is being written, or if something else was
    touched_at: int  # in nanoseconds, by the file server's clock


def read_lock(path: Path) -> LockState | None:
    """The file's contents; None if there is none. It is opened each time, for NFS then asks the server.

    Raises:
        OSError: if it cannot be read, or is no regular file.
    """
    try:
        with open_regular(path) as file:
            touched_at = os.fstat(file.fileno()).st_mtime_ns
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    try:
        return LockState(_owner(parse_json(data)), touched_at)
    except ValueError:
        return LockState(None, touched_at)


def _owner(values: Any) -> Owner | None:
    """The owner that the file names; None if no run has written these values."""
    kinds: dict[str, type] = {field.name: type(getattr(_SOME_OWNER, field.name)) for field in fields(Owner)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        return None
    if not all(type(values[name]) is kind for name, kind in kinds.items()):
        return None
    is_process = 0 < values["process"] < 2**31 and math.isfinite(values["process_start"])
    return Owner(**values) if is_process else None
