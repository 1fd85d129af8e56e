"""Stops a run on request: SIGTERM, SIGINT, SIGHUP, SIGUSR1 or the file RUN/STOP, agreed upon by all ranks.

Python runs a signal's handler when the main thread next runs Python code. A rank that waits in a collective runs none.
So the handler does nothing. The interpreter also writes the signal's number into a pipe, at once and from C, and a
thread reads it there. That thread may take locks and print, and it can end a process whose main thread is stuck.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import psutil

from data.batches.workers import STOP_SIGNALS
from ranks.collectives import max_on_host
from ranks.environment import Environment
from supervision.exit_status import leave
from utils.log_clock import stamped
from utils.printing import print_line

T = TypeVar("T")

SAME_WISH_SECONDS = 1.0  # scancel reaches a rank twice, directly and through torchrun, 2 ms apart on one machine
LOOK_SECONDS = 1.0  # how often rank 0 looks for the file; each look may be a request to a file server
_FILE = 100  # the code of a request by file; others are numbers of signals
_CODES = 1000


class Agreement(NamedTuple):
    """The result of `StopRequests.agree`, the same on all ranks."""

    stop: bool
    flags: tuple[bool, ...]  # for each flag, whether it was true on any rank


class StopRequests:
    """Listens for requests to stop. Used as a context around the loop.

    Outside of it, signals have their usual effect. If the process ends with the run (`ends_process`) and a signal came
    inside or the run has ended well, the handlers stay, so that no signal changes the exit status of the run. After an
    error only the SIGTERM handler stays, because a launcher that has seen one rank end sends SIGTERM to the others,
    which may still have to say why. Off the main thread Python allows no handlers; there, only the file works.
    """

    def __init__(self, env: Environment, folder: Path, ends_process: bool) -> None:
        self.env, self.file, self.ends_process = env, folder / "STOP", ends_process
        self.asked = ""  # by what, in words, the same on every rank; empty until agreed upon
        self._signal = 0  # the first that this rank received
        self._has_promised = False
        self._is_over = False  # then the first signal changes nothing
        self._next_look = 0.0
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._pipe = (-1, -1)

    def __enter__(self) -> StopRequests:
        if self.env.is_rank_zero:
            self._remove_stale_file()
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)  # set_wakeup_fd demands it: a full pipe must not stop the handler
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._listen, daemon=True).start()
            for number in STOP_SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup
                self._handlers[number] = signal.signal(number, _do_nothing)
                signal.siginterrupt(number, False)  # system calls of libraries go on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handlers:
            return
        if self.ends_process and (self._signal or self.asked or self._is_over):
            atexit.register(_ignore_signals)  # while the interpreter ends, handlers are gone before the process is
            return
        speaks = self.ends_process and error is not None
        for number, handler in self._handlers.items():
            if not (speaks and number == signal.SIGTERM):
                signal.signal(number, handler)
        if speaks:
            self._is_over = True
            return
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._pipe[1], bytes(1))  # no signal has this number: the thread's end
        os.close(self._pipe[1])

    def run_has_ended(self) -> None:
        """Tell that the run has ended well: one signal more changes nothing, a second one still ends the process."""
        self._is_over = True

    def agree(self, *flags: bool) -> Agreement:
        """Whether any rank was asked to stop. Every rank must call this once per step, with as many flags.

        It costs one all-reduce in host memory.
        """
        asked_by = self._signal
        if not asked_by and self._file_is_there():
            asked_by = _FILE
        # One number for rank and reason, so that one all-reduce tells both; the largest is that of the lowest rank.
        mine = (self.env.world_size - self.env.rank) * _CODES + asked_by if asked_by else 0
        # docs/decisions.md, "Stopping is agreed upon once per step".
        first, *agreed = max_on_host(mine, *flags)
        if first and not self.asked:
            self.asked = self._in_words(first)
            self._promise(self.asked)
            if self.env.is_rank_zero:
                with contextlib.suppress(OSError):  # it may be another user's file
                    self.file.unlink()
        return Agreement(bool(self.asked), tuple(map(bool, agreed)))

    def unanswered(self) -> bool:
        """Whether this rank was signalled and the ranks have not agreed yet. If one of them is gone they never will."""
        return bool(self._signal) and not self.asked

    def until_asked(self, items: Iterable[T]) -> UntilAsked[T]:
        """The items, until any rank is asked to stop. Every rank gets equally many."""
        return UntilAsked(self, items)

    def _in_words(self, first: int) -> str:
        code = first % _CODES
        if code == _FILE:
            return f"the file {self.file}"
        rank = self.env.world_size - first // _CODES
        return signal.Signals(code).name + (f" on rank {rank}" if self.env.world_size > 1 else "")

    def _file_is_there(self) -> bool:
        now = time.monotonic()
        if not self.env.is_rank_zero or self.asked or now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return os.path.exists(self.file)  # Path.exists would raise if a file server does not answer

    def _remove_stale_file(self) -> None:
        """Remove a request that was meant for an earlier run. One made while this run was loading is kept."""
        if self.file.exists() and self.file.stat().st_mtime < psutil.Process().create_time():
            self.file.unlink(missing_ok=True)
            print_line(f"{self.file} is older than this run: removed")

    def _listen(self) -> None:
        """The thread: note the first signal. A later one ends the process, unless it is an echo of the first."""
        first_at = 0.0
        while number := os.read(self._pipe[0], 1)[0]:
            if number not in STOP_SIGNALS:
                continue  # SIGCHLD, which torch handles
            name, now = signal.Signals(number).name, time.monotonic()
            if not self._signal:
                self._signal, first_at = number, now
                # A launcher that has seen a rank end sends SIGTERM to the others: then they never agree, and no
                # checkpoint is written.
                if not self._is_over and (self.env.world_size == 1 or number != signal.SIGTERM):
                    self._promise(name)
            elif now - first_at > SAME_WISH_SECONDS:
                self._say(f"{name} again: this ends at once, without a checkpoint")
                leave(128 + number)
        os.close(self._pipe[0])

    def _promise(self, by: str) -> None:
        if not self._has_promised:
            self._has_promised = True
            self._say(f"{by}: the run ends after this step, with a checkpoint; once more, and it ends at once")

    def _say(self, line: str) -> None:
        if self.env.is_rank_zero:
            print_line("\n" + "\n".join(stamped(line)), to_stderr=True)  # below a progress bar


class UntilAsked(Generic[T]):
    """Items that end early, on all ranks alike, if any rank is asked to stop."""

    def __init__(self, requests: StopRequests, items: Iterable[T]) -> None:
        self.requests, self.items = requests, items
        self.cut_short = False  # whether they ended early

    def __iter__(self) -> Iterator[T]:
        for item in self.items:
            if self.requests.agree().stop:
                self.cut_short = True
                return
            yield item


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler of every signal; see the top of this file."""


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
