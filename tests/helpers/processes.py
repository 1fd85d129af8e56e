"""Runs of finetuning.py in real processes: a persistent group for many small runs, and the command line itself."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(folder) if event["event"] == "train"]


@dataclass
class Outcome:
    """One rank's end: its exit status and what it printed."""

    status: int
    stdout: str
    stderr: str


def _serve(rank: int, connection: Any) -> None:
    """A worker: run finetuning.main(argv), or a function, for each request, as one rank of a fresh process group."""
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    import finetuning

    while (request := connection.recv()) is not None:
        number, argv, world_size, port = request
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = finetuning.main(argv) if isinstance(argv, list) else argv() or 0
            except BaseException:
                traceback.print_exc()
                status = 1
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        connection.send((number, Outcome(status, out.getvalue(), err.getvalue())))


class ProcessGroup:
    """Worker processes that stay: importing torch and transformers is most of a small run's time."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes, self.number = [], [], 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=False)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def run(
        self, argv: Sequence[str] | Callable[[], int | None], world_size: int, timeout_seconds: float = 300
    ) -> list[Outcome]:
        """Run with these flags, or a function that can be pickled, on `world_size` ranks; the outcomes by rank."""
        port, self.number = free_port(), self.number + 1
        for connection in self.connections[:world_size]:
            connection.send((self.number, argv if callable(argv) else list(argv), world_size, port))
        outcomes = []
        for rank, connection in enumerate(self.connections[:world_size]):
            number = 0
            while number != self.number:  # a reply that is older belongs to a run that was given up
                if not connection.poll(timeout_seconds):
                    raise TimeoutError(f"rank {rank} did not end within {timeout_seconds} s: {argv}")
                number, outcome = connection.recv()
            outcomes.append(outcome)
        return outcomes

    def train(self, argv: Sequence[str] | Callable[[], int | None], world_size: int) -> list[Outcome]:
        """As `run`, for runs that must finish."""
        outcomes = self.run(argv, world_size)
        assert [outcome.status for outcome in outcomes] == [0] * world_size, "\n".join(o.stderr for o in outcomes)
        return outcomes

    def close(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(20)
            process.kill()


def command(
    *flags: str, nproc: int | None = None, script: str = "finetuning.py", options: Sequence[str] = ()
) -> list[str]:
    """`python finetuning.py ...`, or torchrun with so many processes and these options."""
    launcher = [] if nproc is None else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    return [sys.executable, *launcher, *options, str(ROOT / script), *flags]


def _variables(environment: dict[str, str]) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return variables | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class RunningCommand:
    """The command line, running: under torchrun, or as so many processes that no launcher ends, as under srun.

    What is started is one process group, as from a shell.
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
    ) -> None:
        nproc = world_size if torchrun else None
        self.log, argv = log, command(*flags, nproc=nproc, script=script, options=options)
        environments: list[dict[str, str]] = [{}]
        if not torchrun:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
            environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        self.started: list[subprocess.Popen[bytes]] = []
        with open(log, "w") as file:
            for environment in environments:
                group = self.started[0].pid if self.started else 0
                variables = _variables(environment)
                started = subprocess.Popen(argv, cwd=cwd, env=variables, stdout=file, stderr=file, process_group=group)
                self.started.append(started)

    def processes(self) -> list[psutil.Process]:
        """What was started, and what that started, as far as it still runs."""
        found = []
        for started in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(started.pid)
                found += [process, *process.children(recursive=True)]
        return [process for process in found if _runs(process)]

    def rank(self, rank: int) -> psutil.Process:
        """The process that is this rank."""
        is_rank = [process for process in self.processes() if process.environ().get("RANK") == str(rank)]
        return min(is_rank, key=psutil.Process.create_time)  # its DataLoader workers have its variables, too

    def wait(self, timeout_seconds: float) -> list[int]:
        """The exit statuses of what was started, when all have ended."""
        deadline = time.monotonic() + timeout_seconds
        return [started.wait(max(0.1, deadline - time.monotonic())) for started in self.started]

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until(condition: Callable[[], bool], run: RunningCommand) -> None:
    """Look until it holds; the run must not end before."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, run.log.read_text()
        assert run.processes(), run.log.read_text()
        time.sleep(0.02)


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, alive


def run_command(
    *flags: str, nproc: int | None = None, cwd: Path = ROOT, timeout_seconds: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line itself, one thread per process, and wait for its end."""
    return subprocess.run(
        command(*flags, nproc=nproc),
        cwd=cwd,
        env=_variables(environment),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
