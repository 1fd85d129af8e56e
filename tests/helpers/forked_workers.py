"""Forked processes of benchmarks/matrix/run_worker.py: a new interpreter imports everything for ten seconds."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from benchmarks.matrix.run_workers import RunWorkers
from benchmarks.runs.launch import ROOT
from tests.helpers.forked import Fork
from tests.helpers.processes import process_variables


class ForkedWorker(Fork):
    """Used as RunWorkers uses subprocess.Popen."""

    def __init__(self, variables: dict[str, str]) -> None:
        (requests, stdin), (stdout, replies) = os.pipe(), os.pipe()
        with open(os.devnull, "w") as nothing:
            super().__init__(
                ["-m", "benchmarks.matrix.run_worker"],
                cwd=Path(ROOT),
                environment=process_variables(variables),
                stdin=requests,
                stdout=replies,
                stderr=nothing.fileno(),
            )
        os.close(requests)
        os.close(replies)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

    def terminate(self) -> None:
        # The fork server may have reaped it without having told its status yet.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def start_forked(workers: RunWorkers) -> ForkedWorker:
    """In place of RunWorkers._start. Forks see no GPUs, with or without the variable that hides them."""
    variables = {name: value for name, value in workers.variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    return ForkedWorker({"HF_HUB_OFFLINE": "1"} | variables)
