"""The ranks of a forked torchrun, forked in turn, by a process that has one thread.

torchrun has several, and a fork inherits the locks that they hold at that moment but not the threads that would release
them: a rank could wait for ever for glibc's lock within getaddrinfo.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
import os
import pickle
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

SERVER_NAME = "rank-server"  # as ps shows it
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36


class RankServer:
    """Forks ranks, which become children of the process that made this object.

    That process makes it while it has one thread. A rank's own parent ends at once; the kernel then hands the rank to
    the nearest ancestor that asks for such orphans, as that process does while it waits for the rank's pid.

    Args:
        run: what a rank does with its command line; it ends the process.
    """

    def __init__(self, run: Callable[[list[str]], NoReturn]) -> None:
        self._connection, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()  # so that the other end closes when the maker of this object ends
            os.setsid()  # what is sent to the maker's process group is not for this process
            _prctl(_PR_SET_NAME, SERVER_NAME.encode())
            _serve(other_end, run)
        other_end.close()
        atexit.register(self._stop)

    def fork(self, arguments: Sequence[str], environment: dict[str, str], stdout: int, stderr: int) -> int:
        """Start a rank. Returns its pid."""
        message = pickle.dumps((list(arguments), environment))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        socket.send_fds(self._connection, [message], [stdout, stderr])
        pid = int(self._connection.recv(100))
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def popen(self, args: Any, env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool) -> ForkedRank:
        """In place of subprocess.Popen: `[python, -u, script, ...]` is a fork, in a session of its own."""
        fds = [fd if file is None else file.fileno() for fd, file in ((1, stdout), (2, stderr))]
        return ForkedRank(args, self.fork([word for word in args[1:] if word != "-u"], env, *fds))

    def _stop(self) -> None:
        self._connection.close()
        os.waitpid(self._pid, 0)


class ForkedRank:
    """A rank, used like subprocess.Popen."""

    def __init__(self, args: Any, pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode  # type: ignore[return-value]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(connection: socket.socket, run: Callable[[list[str]], NoReturn]) -> NoReturn:
    """Fork a rank for each request, until the other end closes."""
    while True:
        message, fds, _flags, _address = socket.recv_fds(connection, 1 << 20, 2)
        if not message:
            os._exit(0)
        arguments, environment = pickle.loads(message)
        reader, writer = os.pipe()
        parent = os.fork()
        if parent == 0:
            pid = os.fork()
            if pid == 0:
                _become_rank(environment, fds)
                run(arguments)
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.waitpid(parent, 0)  # from now on the rank is a child of the process at the other end
        connection.send(os.read(reader, 100))
        for fd in (reader, writer, *fds):
            os.close(fd)


def _become_rank(environment: dict[str, str], fds: Sequence[int]) -> None:
    os.setsid()
    _prctl(_PR_SET_NAME, b"python")
    for target, fd in enumerate(fds, start=1):
        os.dup2(fd, target)
    os.closerange(3, 1 << 12)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What torchrun does at its own end is not for its ranks to do.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
