"""Hosts on this machine: network namespaces joined by a bridge, each with its own name, addresses and processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.processes import ROOT, process_variables

# PATH starts with this interpreter's folder: shipped scripts start `python` and `torchrun`.
_BIN = str(Path(sys.executable).parent)
_ENTER = 'mount --make-rprivate /; mount --bind "$0" /etc/hosts; hostname "$1"; shift; exec "$@"'

_NETWORKS = itertools.count()  # of this process
_TOKEN_BUCKET = ("tbf", "burst", "256k", "latency", "200ms")


def missing() -> str:
    """Why there can be no such hosts here, in words; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tools = [tool for tool in ("ip", "nsenter", "unshare", "mount", "hostname") if shutil.which(tool) is None]
    if tools:
        return f"needs {', '.join(tools)}: apt-get install iproute2 util-linux hostname"
    probe = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "ip", "link", "add", "probe", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"needs network namespaces, and the system refuses: {done.stderr.strip()}" if done.returncode else ""


def missing_limits() -> str:
    """Why the network of such hosts cannot be limited here, in words; empty if it can."""
    limit = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *_TOKEN_BUCKET, "rate", "1mbit"]
    try:
        done = subprocess.run(limit, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"needs unshare and tc: {error}"
    return f"needs tc's token bucket filter, and the system refuses: {done.stderr.strip()}" if done.returncode else ""


class Host:
    """One host; what runs on it sees its name, its addresses, and the names in its /etc/hosts."""

    def __init__(self, name: str, address: str, namespace: str, hosts_file: Path) -> None:
        self.name, self.address, self.namespace, self.hosts_file = name, address, namespace, hosts_file

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> HostProcess:
        """Start a command as the first process of a container on this host, its output added to the log."""
        return HostProcess(self.inside(command), log, dict(environment or {}), cwd)

    def inside(self, command: Sequence[str]) -> list[str]:
        isolate = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["bash", "-c", _ENTER, str(self.hosts_file), self.name, *command]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *isolate, *enter]

    def run(self, command: Sequence[str], timeout_seconds: float = 120, **environment: str) -> tuple[int, str]:
        """A command's exit status and all that it printed."""
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
        done = subprocess.run(
            self.inside(command), cwd=ROOT, env=variables(environment), timeout=timeout_seconds, **given
        )
        return done.returncode, done.stdout

    def limit(self, megabits_per_second: float) -> None:
        """Limit what this host sends."""
        device = ("-n", self.namespace, "qdisc", "add", "dev", "eth0", "root")
        _ip_tool("tc", *device, *_TOKEN_BUCKET, "rate", f"{megabits_per_second}mbit")


class HostProcess:
    """A command that runs on a host, and its descendants."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str], cwd: Path) -> None:
        self.log = log
        with open(log, "a") as file:
            self.popen = subprocess.Popen(
                command, cwd=cwd, env=variables(environment), stdout=file, stderr=subprocess.STDOUT
            )

    def first(self) -> psutil.Process:
        """The container's first process, which a signal to a container reaches."""
        return psutil.Process(self.popen.pid).children()[0]

    def ranks(self) -> list[psutil.Process]:
        """The processes of finetuning.py that torchrun has started here, in order."""
        found = []
        for process in psutil.Process(self.popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "LOCAL_RANK" in process.environ() and "finetuning.py" in process.cmdline():
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def kill(self) -> None:
        """End every process of the container at once, as if the host lost its power."""
        with contextlib.suppress(psutil.Error, IndexError):  # it has ended
            self.first().kill()
        self.popen.wait(30)

    def terminate(self) -> None:
        self.first().send_signal(signal.SIGTERM)

    def wait(self, timeout_seconds: float) -> int:
        return self.popen.wait(timeout_seconds)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """A process's variables, with this interpreter's commands first in PATH."""
    return process_variables({"PATH": f"{_BIN}:{os.environ['PATH']}", **environment})


@contextlib.contextmanager
def made_hosts(folder: Path, *names: str, more_names: Mapping[str, str] | None = None) -> Iterator[list[Host]]:
    """Hosts on one network. Each knows every name.

    Args:
        names: of the hosts; words after the first of each are further names of it.
        more_names: addresses of further names.
    """
    mark = f"ft{os.getpid() % 100000}-{next(_NETWORKS)}"
    switch = f"{mark}-switch"
    spaces = [f"{mark}-{index}" for index in range(len(names))]
    addresses = [f"10.77.0.{10 + index}" for index in range(len(names))]
    lines = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
    lines += ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in (more_names or {}).items())]
    folder.mkdir(parents=True, exist_ok=True)
    hosts = []
    try:
        _ip_tool("ip", "netns", "add", switch)
        _ip_tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip_tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, (name, space, address) in enumerate(zip(names, spaces, addresses, strict=True)):
            _ip_tool("ip", "netns", "add", space)
            port = f"port{index}"
            _ip_tool("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip_tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip_tool("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip_tool("ip", "-n", space, "link", "set", link, "up")
            file = folder / f"hosts-{index}"
            file.write_text("\n".join(lines) + "\n")
            hosts.append(Host(name.split()[0], address, space, file))
        yield hosts
    finally:
        for space in [*spaces, switch]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip_tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def wait_for(
    condition: Callable[[], bool], seconds: float, log: Callable[[], str] = str, pause_seconds: float = 0.05
) -> None:
    """Wait until the condition holds; if it does not, show the log."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(pause_seconds)
