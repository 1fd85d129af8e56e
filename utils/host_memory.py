"""Host memory: the machine's, this container's limit, and whether the kernel has killed a process for lack of it.

Linux counts the processes that its out-of-memory killer has ended: for each control group (a container, a Slurm step)
in memory.events or memory.oom_control, and for the whole machine in /proc/vmstat
(https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html).
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from utils.units import readable

ROOT = Path("/")
"""Where /proc and /sys are."""


@dataclass(frozen=True)
class HostMemory:
    """Sizes in bytes; None: not known, or no limit."""

    total: int | None
    available: int | None
    limit: int | None  # of the control group
    used: int | None  # by it, without cached files that nobody has used lately
    num_kills: int  # processes killed so far
    kills_of: Literal["container", "machine"]  # whose processes those were

    def __str__(self) -> str:
        parts = []
        if self.limit is not None:
            used = "" if self.used is None else f", {readable(self.used)} of them in use"
            parts.append(f"the container may take {readable(self.limit)}{used}")
        if self.total is not None and self.available is not None:
            parts.append(f"the machine has {readable(self.total)}, {readable(self.available)} of them available")
        return "; ".join(parts)


def peak_resident() -> int:
    """The most bytes that this process has had resident.

    `ru_maxrss` alone may be that of the process which started this one: Linux keeps it across exec.
    """
    of_this_program = _numbers(ROOT / "proc/self/status", r"^(VmHWM):\s+(\d+) kB").get("VmHWM")
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if of_this_program is None else of_this_program
    return kib * 1024


def host_bytes() -> int:
    """Host memory of this process and its neighbors in the container: the container's limit, or the machine's."""
    memory = read_host_memory()
    machine = memory.total if memory.total is not None else psutil.virtual_memory().total
    return machine if memory.limit is None else min(machine, memory.limit)


def free_host_bytes() -> int:
    """Host memory that is left to them. Cached files count as free: the kernel drops them when memory gets short."""
    memory = read_host_memory()
    free = memory.available if memory.available is not None else psutil.virtual_memory().available
    for group in _groups():  # a parent with a larger limit may be nearly full of others' memory
        limit, used = group.limit(), group.used()
        if limit is not None and used is not None:
            free = min(free, limit - used)
    return max(0, free)


def read_host_memory() -> HostMemory:
    """Host memory as it is now."""
    meminfo = _numbers(ROOT / "proc/meminfo", r"^(\w+):\s+(\d+) kB")
    total, available = (meminfo.get(name) for name in ("MemTotal", "MemAvailable"))
    kills = _numbers(ROOT / "proc/vmstat", r"^(oom_kill) (\d+)").get("oom_kill", 0)
    limit = used = None
    of: Literal["container", "machine"] = "machine"
    for group in _groups():
        own = group.limit()
        # The least limit of the group and its parents holds.
        if own is not None and (limit is None or own < limit):
            limit, used = own, group.used()
    for group in _groups():
        if (counted := group.num_kills()) is not None:
            kills, of = counted, "container"
            break
    if limit is not None and total is not None and limit >= total * 1024:
        limit = used = None  # cgroup v1 has no word for "no limit"
    return HostMemory(
        total=None if total is None else total * 1024,
        available=None if available is None else available * 1024,
        limit=limit,
        used=used,
        num_kills=kills,
        kills_of=of,
    )


@dataclass(frozen=True)
class _Group:
    """The folder of a control group."""

    folder: Path
    version: Literal[1, 2]

    def limit(self) -> int | None:
        return _number(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))

    def used(self) -> int | None:
        name, cached = ("current", "inactive_file") if self.version == 2 else ("usage_in_bytes", "total_inactive_file")
        used = _number(self.folder / f"memory.{name}")
        cache = _numbers(self.folder / "memory.stat", rf"^({cached}) (\d+)").get(cached, 0)
        return None if used is None else max(0, used - cache)

    def num_kills(self) -> int | None:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _numbers(self.folder / name, r"^(oom_kill) (\d+)").get("oom_kill")


def _groups() -> Iterator[_Group]:
    """The control groups of this process that govern memory, its own first, then its parents."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts: dict[str, tuple[Literal[1, 2], str]] = {"memory": (1, "sys/fs/cgroup/memory"), "": (2, "sys/fs/cgroup")}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in mounts:
            continue
        version, mount = mounts[controllers]
        top = ROOT / mount
        folder = top / path.strip("/")
        if not folder.is_dir():  # a container that sees the host's name of its group, and only its own folder
            folder = top
        while True:
            yield _Group(folder, version)
            if folder == top:
                break
            folder = folder.parent


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        return int(file.read_text())
    return None


def _numbers(file: Path, line: str) -> dict[str, int]:
    with contextlib.suppress(OSError):
        return {name: int(number) for name, number in re.findall(line, file.read_text(), flags=re.MULTILINE)}
    return {}


def killed_since(before: HostMemory | None) -> str:
    """Says that the kernel has killed processes for want of memory since then, with the figures; "" if it has not."""
    now = read_host_memory()
    if before is None or before.kills_of != now.kills_of or now.num_kills <= before.num_kills:
        return ""
    count = now.num_kills - before.num_kills
    return (
        f"host memory ran out: the kernel has killed {count} process{'es' * (count > 1)} of this {now.kills_of} since "
        f"the run began; {now}"
    )
