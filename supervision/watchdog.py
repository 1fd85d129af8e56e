"""Ends a run whose ranks cannot go on, and says which rank failed and where, once.

The timeouts of collectives cannot do it alone: they name no rank, NCCL's abort the process without a line of ours, and
NCCL does not notice a peer that was killed. So each rank has a thread that reports to rank 0 every few seconds, over a
gloo group of its own: where the main thread is, for how long it has not moved, how many collectives it has entered.
Rank 0 answers with what all of them do next. A rank that died is a closed connection, whatever the main threads are
doing; one that hangs is reported by its own watchdog. The main thread only notes where it is (`watchdog.at`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from supervision.exit_status import FAILED, GRACE_SECONDS, leave
from supervision.progress import LONG_SECONDS, Progress, Stillness
from supervision.traces import close_stacks, open_stacks, where_main_thread_is, write_traces
from supervision.verdict import Report, State, Verdict, judge, judge_lost
from utils.distributed import num_collectives
from utils.environment import Environment

T = TypeVar("T")

INTERVAL_SECONDS = 5
_MESSAGE_BYTES = 1024


class LostRank(Exception):
    """The connection to another rank's watchdog has closed."""


class Watchdog:
    """This rank's thread. With one process there is nothing to watch."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.progress = Progress()
        self.traces: Path | None = None  # the folder for what a hang leaves
        self.before_leaving: Callable[[], None] = lambda: None  # called where the main thread cannot end by itself
        self.was_signalled: Callable[[], bool] = lambda: (
            False
        )  # whether a launcher would have ended this process by now
        self.beside: list[dist.ProcessGroup] = []  # groups of other threads, which say nothing about the main thread
        self._state: State = "running"
        self._thread: threading.Thread | None = None
        self._woken, self._told_by_others = threading.Event(), threading.Event()

    def start(self, step_timeout_seconds: int | None) -> None:
        """Watch from now on. Every rank must call this, right after the process group has started."""
        self.progress = Progress(step_timeout_seconds)
        if self.env.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * LONG_SECONDS))
            self._thread = threading.Thread(target=self._watch, args=(group, open_stacks()), daemon=True)
            self._thread.start()

    def at(self, step: int, activity: str) -> None:
        """Note where the main thread is: in `step` ("training"), or at something else after it."""
        self.progress.at(step, activity)

    def each(self, items: Iterable[T], step: int, activity: str) -> Iterator[T]:
        """The items; each of them is a move."""
        for item in items:
            self.at(step, activity)
            yield item

    def stop(self) -> None:
        """The run has finished: wait until every rank says so."""
        self._enter("finished")
        if self._thread is not None:
            self._thread.join()

    def others_tell(self, seconds: float) -> bool:
        """This rank holds an error. Let the others speak for so long; True where the user has been told."""
        self._enter("failing")
        return self._told_by_others.wait(seconds)

    def has_told(self) -> None:
        """This rank has told the user why the run ends, so the others need not."""
        self._enter("told")
        if self._thread is not None:
            self._thread.join(3 * INTERVAL_SECONDS)

    def _enter(self, state: State) -> None:
        self._state = state
        self._woken.set()

    def _watch(self, group: dist.ProcessGroup, stacks: IO[bytes]) -> None:
        """The thread: rounds until the run ends."""
        stillness, verdict = Stillness(INTERVAL_SECONDS), Verdict("go")
        while verdict.kind == "go":
            if self._woken.wait(INTERVAL_SECONDS):
                time.sleep(0.02)  # the end has begun: look often
            position = self.progress.position
            report = Report(
                state=self._state,
                place=str(position),
                where=where_main_thread_is()[:120],
                num_collectives=num_collectives(leaving_out=[group, *self.beside]),
                still_seconds=stillness.seconds(position),
                limit_seconds=self.progress.limit_seconds(),
            )
            verdict = (self._lead if self.env.is_rank_zero else self._follow)(group, report)
        faulthandler.cancel_dump_traceback_later()
        if verdict.kind == "over":
            self._end(verdict)
        elif verdict.kind == "hang":
            self._end_hang(verdict, stacks)
        close_stacks(stacks)

    def _lead(self, group: dist.ProcessGroup, report: Report) -> Verdict:
        """Rank 0's round: every rank's report, then one verdict for all."""
        others = range(1, self.env.world_size)
        receiving = {rank: _in_background(_receive, group, rank) for rank in others}
        lost = _lost(receiving, report, margin_seconds=30)
        verdict = judge_lost(lost, report.place) if lost else judge([report, *(receiving[r].result() for r in others)])
        message = replace(verdict, message="")
        wait([_in_background(_send, group, rank, message) for rank in others if rank not in lost], timeout=30)
        return verdict

    def _follow(self, group: dist.ProcessGroup, report: Report) -> Verdict:
        """The round of any other rank."""

        def exchange() -> Verdict:
            _send(group, 0, report)
            return _receive(group, 0)

        answer = _in_background(exchange)
        lost = _lost({0: answer}, report, margin_seconds=60)
        return judge_lost(lost, report.place) if lost else answer.result()

    def _end(self, verdict: Verdict) -> None:
        """A rank is gone, or has told its error: end this one too, after what a launcher would do and say."""
        if self._state == "told":
            return
        main_ends_by_itself = self._state == "failing"
        if not main_ends_by_itself:
            self._write_end()
        if verdict.ranks or not main_ends_by_itself:
            self._let_launcher_end_it(GRACE_SECONDS if verdict.ranks else 5)
        self._say(verdict)
        self._told_by_others.set()
        if not main_ends_by_itself:
            leave(FAILED)

    def _let_launcher_end_it(self, seconds: float) -> None:
        """A launcher that has seen a rank end tells the user and sends SIGTERM, which the loop takes for a request."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.was_signalled():
                leave(FAILED)
            time.sleep(0.1)

    def _end_hang(self, verdict: Verdict, stacks: IO[bytes]) -> NoReturn:
        """The main thread may be anywhere, and stay there: leave traces, and end the process from here."""
        place = ""
        if self.traces is not None:
            try:
                write_traces(self.traces, self.env.rank, stacks)
                place = f". Stacks and last collectives of the ranks: {self.traces}"
            except OSError as error:
                place = f". No traces: {error}"
        self._say(replace(verdict, message=verdict.message and verdict.message + place))
        self._write_end()
        # Those at fault end first, and are what a launcher reports; none ends before the others have written, too.
        time.sleep(3 if self.env.rank in verdict.ranks else 6)
        leave(FAILED)

    def _say(self, verdict: Verdict) -> None:
        """Print the message: rank 0, or without it one rank per machine."""
        if verdict.message and (self.env.rank in (0, 1) or self.env.local_rank == 0):
            with contextlib.suppress(OSError):  # nobody listens
                print(f"\nerror: {verdict.message}", file=sys.stderr, flush=True)

    def _write_end(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the process
            self.before_leaving()


def _in_background(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call `function` in a thread of its own, which nothing waits for at the end of the process.

    A wait inside gloo that ends for a timeout would close its connections to all ranks.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except LostRank as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _lost(transfers: dict[int, Future[Any]], report: Report, *, margin_seconds: float) -> dict[int, float | None]:
    """Wait for transfers with other ranks.

    Returns:
        Nothing when all are done. Else the ranks whose connection has closed (None), or, if there is none, those that
        have been silent for longer than any may be, and for how many seconds.
    """
    waited = 0.0  # time in which this process was stopped does not count
    while True:
        # Should something hold even this thread up, a thread of C shows the stacks, on stderr.
        faulthandler.dump_traceback_later(report.limit_seconds + 15, file=2)
        _, pending = wait(transfers.values(), timeout=INTERVAL_SECONDS, return_when=FIRST_EXCEPTION)
        closed = [rank for rank, transfer in transfers.items() if transfer.done() and transfer.exception() is not None]
        if closed or not pending:
            return dict.fromkeys(closed)
        waited += INTERVAL_SECONDS
        if waited > report.limit_seconds + margin_seconds:
            return {rank: waited for rank, transfer in transfers.items() if transfer in pending}


def _send(group: dist.ProcessGroup, rank: int, message: Report | Verdict) -> None:
    data = bytearray(json.dumps(asdict(message)).encode().ljust(_MESSAGE_BYTES))
    _transfer(lambda: group.send([torch.frombuffer(data, dtype=torch.uint8)], rank, 0))


def _receive(group: dist.ProcessGroup, rank: int) -> Any:
    """A rank's Report, or rank 0's Verdict."""
    data = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    _transfer(lambda: group.recv([data], rank, 0))
    values = json.loads(data.numpy().tobytes())
    return Verdict(**values) if "kind" in values else Report(**values)


def _transfer(start: Callable[[], dist.Work]) -> None:
    try:
        start().wait(timedelta(days=7))
    except RuntimeError as error:  # gloo has no finer one
        raise LostRank from error
