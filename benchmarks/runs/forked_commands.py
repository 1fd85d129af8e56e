"""Run command lines of finetuning.py in forks of this process, so that each costs its own work and no imports.

This process must have imported what the forks need, and have no threads: torch computes in forks only.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runs.launch import ROOT, SCRIPT, free_port

LIMIT_SECONDS = 120  # of a run that compiles nothing


@dataclass
class Ended:
    """The exit status and the output of each rank; a rank whose time was up has the status -9."""

    statuses: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_command(
    flags: Sequence[str],
    world_size: int,
    folder: Path,
    first: Callable[[], Any] = lambda: None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Ended:
    """Run it on its ranks, which are killed after `limit_seconds`.

    Args:
        folder: it runs in, and for its output.
        first: each rank calls this before the script.
    """

    def run() -> None:
        first()
        run_script(flags, folder)

    size, port, started = str(world_size), str(free_port()), time.monotonic()
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"FINETUNING_GRACE_SCALE": "0.1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    outputs = [folder / f"output-{rank}" for rank in range(world_size)]
    pids = [
        run_forked(run, output, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank, output in enumerate(outputs)
    ]
    statuses = [wait(pid, started + limit_seconds) for pid in pids]
    texts = [output.read_text(errors="replace") for output in outputs]
    return Ended(statuses, texts, time.monotonic() - started)


def run_forked(run: Callable[[], Any], output: Path, **variables: str) -> int:
    """Run a function in a fork of this process, in a session of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        with open(output, "wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        os.environ.update(variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_script(flags: Sequence[str], cwd: Path) -> None:
    os.chdir(cwd)
    sys.argv, sys.path[0] = [SCRIPT, *flags], str(ROOT)
    runpy.run_path(SCRIPT, run_name="__main__")


def wait(pid: int, deadline: float) -> int:
    """The exit status of a fork, which is killed at the deadline."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.005)
