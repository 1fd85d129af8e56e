"""Processes forked by tests/helpers/fork_server.py: used like subprocess.Popen, started in milliseconds."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# pytest's workers share one server: the name of its socket is that of the test run.
_ADDRESS = f"\0finetuning-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
SERVER_ENDED = (
    "the fork server has ended: give pytest CUDA_VISIBLE_DEVICES= if a GPU is there; FORK_SERVER_LOG=1 says why"
)
WRITE_STACKS = signal.SIGRTMIN  # lets a fork write to stderr where its threads are
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(_ADDRESS)
    return connection


@functools.cache
def start_server() -> socket.socket:
    """Start the server if this test run has none; the connection keeps it until this process ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_ADDRESS)
        except OSError:  # another worker's
            for _ in range(1200):
                try:
                    return _connect()
                except OSError:  # it does not listen yet
                    time.sleep(0.05)
        listener.listen(1000)
        command = [sys.executable, "-m", "tests.helpers.fork_server", str(listener.fileno())]
        log = None if "FORK_SERVER_LOG" in os.environ else subprocess.DEVNULL
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, pass_fds=[listener.fileno()], **given)
        return _connect()


class Fork:
    """A process that runs a script, a module or a function, and its exit status when it has ended.

    Args:
        run: what follows `python` on the command line; or a function that can be pickled, whose result is the status.
        process_group: of an earlier fork, by its pid; by default it is alone in its own.
        stdin: a descriptor to read from; by default there is nothing to read.

    `cpu_seconds` holds what it and its ended children took, when it has ended.
    """

    def __init__(
        self,
        run: Sequence[str] | Callable[[], int | None],
        *,
        cwd: Path,
        environment: dict[str, str],
        stdout: int,
        stderr: int,
        process_group: int = 0,
        stdin: int | None = None,
    ) -> None:
        start_server()
        self.returncode: int | None = None
        try:
            self._connection = _connect()
        except ConnectionRefusedError:
            raise RuntimeError(SERVER_ENDED) from None
        request = {
            "run": pickle.dumps(run) if callable(run) else [str(word) for word in run],
            "cwd": str(cwd),
            "environment": environment,
            "process_group": process_group,
        }
        with open(os.devnull) as nothing:
            fds = [nothing.fileno() if stdin is None else stdin, stdout, stderr]
            socket.send_fds(self._connection, [pickle.dumps(request)], fds)
        self.pid = int(self._connection.recv(100))

    def poll(self) -> int | None:
        """The exit status as subprocess gives it, -9 for one that SIGKILL ended; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self._receive(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self._receive(0)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0) from None
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _receive(self, flags: int) -> None:
        message = self._connection.recv(100, flags)
        if not message:
            raise RuntimeError(SERVER_ENDED)
        status, cpu_seconds = message.split()
        self.returncode, self.cpu_seconds = int(status), float(cpu_seconds)
        self._connection.close()
