"""Runs of finetuning.py: on so many ranks, or as a command line, by forked processes or by new interpreters."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.forked import ONE_THREAD, WRITE_STACKS, Fork
from tests.helpers.forked_ranks import SERVER_NAME

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """Ports that no other process of tests takes: while this one lives, it holds the first of its hundred.

    The system itself hands out higher ones. A run binds its port seconds after it was chosen, so that one of 12,000 at
    random met another worker's once in some suites.
    """
    firsts = list(range(20_000, 32_000, 100))
    random.Random().shuffle(firsts)
    for first in firsts:
        guard = socket.socket()
        with contextlib.suppress(OSError):
            guard.bind(("127.0.0.1", first))
            return guard, itertools.cycle(range(first + 1, first + 100))
        guard.close()
    raise RuntimeError("every hundred of ports is another process's")


def free_port() -> int:
    """A port that is free, and stays so."""
    for port in _own_ports()[1]:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("ports are cycled through without end")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(folder) if event["event"] == "train"]


def log_lines(text: str) -> list[str]:
    """What a run printed, line by line, without the time of day in front of the lines of its log."""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in text.splitlines()]


@dataclass
class Outcome:
    """One rank's end: its exit status and what it printed."""

    status: int
    stdout: str
    stderr: str


class Captured:
    """A fork whose output is kept in memory."""

    def __init__(
        self, run: Sequence[str] | Callable[[], int | None], cwd: Path, environment: dict[str, str], **given: Any
    ) -> None:
        self._out, self._err = os.memfd_create("stdout"), os.memfd_create("stderr")
        self.fork = Fork(run, cwd=cwd, environment=environment, stdout=self._out, stderr=self._err, **given)

    def outcome(self, timeout_seconds: float) -> Outcome:
        """Wait for its end; it is killed when the time is up.

        Raises:
            subprocess.TimeoutExpired: with what it had printed, and where each of its processes was.
        """
        try:
            status = self.fork.wait(max(0.0, timeout_seconds))
        except subprocess.TimeoutExpired as error:
            self._write_stacks()
            self.kill()
            error.add_note("\n".join(self._read()))
            raise
        return Outcome(status, *self._read())

    def _read(self) -> list[str]:
        texts = []
        for fd in (self._out, self._err):
            os.lseek(fd, 0, os.SEEK_SET)
            with open(fd, errors="replace") as file:
                texts.append(file.read())
        return texts

    def _processes(self) -> list[psutil.Process]:
        """It, and its ranks if it is a launcher: these have sessions of their own."""
        try:
            process = psutil.Process(self.fork.pid)
            return [process, *children_of(process, recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _write_stacks(self) -> None:
        """Let each process write to stderr where its threads are."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(WRITE_STACKS)
                time.sleep(0.2)  # one after the other

    def kill(self) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.fork.pid, signal.SIGKILL)


def ranks_of(world_size: int) -> list[dict[str, str]]:
    """The variables of so many ranks on this machine, as srun with torchrun's variables sets them."""
    size = str(world_size)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


SHORT_GRACE = {"FINETUNING_GRACE_SCALE": "0.1"}


class ProcessGroup:
    """Runs on several ranks, each a fresh process, forked and so started in milliseconds.

    If a run fails, no launcher ends its other ranks; they wait for each other a tenth of the usual time.
    """

    def run(
        self,
        argv: Sequence[str] | Callable[[], int | None],
        world_size: int,
        timeout_seconds: float = 300,
        *,
        grace: dict[str, str] = SHORT_GRACE,
    ) -> list[Outcome]:
        """Run with these flags, or a function that can be pickled, on `world_size` ranks; the outcomes by rank.

        Args:
            grace: the variable that says how long ranks wait for each other, {} for as long as in a user's run.
        """
        what = argv if callable(argv) else [str(ROOT / "finetuning.py"), *argv]
        environments = [process_variables(variables | grace) for variables in ranks_of(world_size)]
        ranks = [Captured(what, Path.cwd(), environment) for environment in environments]
        deadline = time.monotonic() + timeout_seconds
        try:
            return [rank.outcome(deadline - time.monotonic()) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.fork.returncode is None:
                    rank.kill()

    def train(self, argv: Sequence[str] | Callable[[], int | None], world_size: int) -> list[Outcome]:
        """As `run`, for runs that must finish."""
        outcomes = self.run(argv, world_size)
        assert [outcome.status for outcome in outcomes] == [0] * world_size, "\n".join(o.stderr for o in outcomes)
        return outcomes


def arguments(
    *flags: str, nproc: int | None = None, script: str = "finetuning.py", options: Sequence[str] = ()
) -> list[str]:
    """What follows `python`: the script and its flags, or torchrun with so many processes and these options."""
    launcher = [] if nproc is None else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    return [*launcher, *options, str(ROOT / script), *flags]


def command(*flags: str, nproc: int | None = None) -> list[str]:
    """The command line for a new interpreter."""
    return [sys.executable, *arguments(*flags, nproc=nproc)]


def process_variables(environment: dict[str, str]) -> dict[str, str]:
    """The variables of a process that is started: this one's without a launcher's, one thread, and those given."""
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return variables | ONE_THREAD | environment


def children_of(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    """What it has started, as if it were a process of its own and no fork."""
    return [child for child in process.children(recursive=recursive) if not _serves_ranks(child)]


def _serves_ranks(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == SERVER_NAME)
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class RunningCommand:
    """The command line, running: under torchrun, or as so many processes that no launcher ends, as under srun.

    What is started is one process group, as from a shell. real: by new interpreters instead of forks.
    """

    def __init__(
        self,
        *flags: str,
        world_size: int,
        torchrun: bool,
        log: Path,
        script: str = "finetuning.py",
        options: Sequence[str] = (),
        cwd: Path = ROOT,
        real: bool = False,
        **environment: str,
    ) -> None:
        nproc = world_size if torchrun else None
        self.log, self.torchrun = log, torchrun
        argv = arguments(*flags, nproc=nproc, script=script, options=options)
        self.started: list[subprocess.Popen[bytes] | Fork] = []
        with open(log, "w") as file:
            for of_rank in [{}] if torchrun else ranks_of(world_size):
                variables = process_variables(of_rank | environment)
                group = self.started[0].pid if self.started else 0
                given: dict[str, Any] = {"cwd": cwd, "stdout": file.fileno(), "stderr": file.fileno()}
                given["process_group"] = group
                if real:
                    started = subprocess.Popen([sys.executable, *argv], env=variables, **given)
                else:
                    started = Fork(argv, environment=variables, **given)
                self.started.append(started)

    def processes(self) -> list[psutil.Process]:
        """What was started, and what that started, as far as it still runs."""
        found = []
        for started in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(started.pid)
                found += [process, *children_of(process, recursive=True)]
        return [process for process in found if _runs(process)]

    def rank(self, rank: int) -> psutil.Process:
        """The process that is this rank."""
        if not self.torchrun:
            return psutil.Process(self.started[rank].pid)
        ranks = children_of(psutil.Process(self.started[0].pid))  # torchrun starts them in order
        return sorted(ranks, key=lambda process: (process.create_time(), process.pid))[rank]

    def wait(self, timeout_seconds: float) -> list[int]:
        """The exit statuses of what was started, when all have ended."""
        deadline = time.monotonic() + timeout_seconds
        return [started.wait(max(0.1, deadline - time.monotonic())) for started in self.started]

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until(condition: Callable[[], bool], run: RunningCommand) -> None:
    """Wait until the condition holds. The run must not end before."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, run.log.read_text()
        assert any(started.poll() is None for started in run.started), run.log.read_text()
        time.sleep(0.02)


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive, alive


def run_command(
    *flags: str,
    nproc: int | None = None,
    cwd: Path = ROOT,
    timeout_seconds: float = 300,
    real: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command line, one thread per process, and wait for its end. real: by new interpreters, not by forks."""
    argv = arguments(*flags, nproc=nproc)
    if real:
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": timeout_seconds}
        return subprocess.run([sys.executable, *argv], cwd=cwd, env=process_variables(environment), **options)
    return run_forked(argv, cwd, environment, timeout_seconds)


def run_forked(
    argv: list[str], cwd: Path = ROOT, variables: dict[str, str] | None = None, timeout_seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """As `python ARGV` is run by subprocess.run, but by a fork."""
    outcome = Captured(argv, cwd, process_variables(variables or {})).outcome(timeout_seconds)
    return subprocess.CompletedProcess(argv, outcome.status, outcome.stdout, outcome.stderr)
