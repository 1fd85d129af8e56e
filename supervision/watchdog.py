"""Ends a run whose ranks cannot go on, and says once which rank failed and where.

The timeouts of collectives are not enough: they name no rank, NCCL's abort the process without a line of ours, and NCCL
does not notice a peer that was killed. So each rank has a thread that reports to rank 0 every few seconds, over a gloo
group of its own: where the main thread is, for how long it has not moved, how many collectives it has entered. Rank 0
answers with what all of them do next. A rank that died is a closed connection, whatever the main threads are doing. A
rank that hangs is reported by its own watchdog. The main thread only notes where it is (`watchdog.at`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import psutil
import torch.distributed as dist

from ranks.environment import Environment
from ranks.process_group import CONNECT_MINUTES, connecting, num_collectives
from supervision.exit_status import FAILED, REFUSED, hand_refusal_over, leave
from supervision.main_thread import MainThread, Stillness
from supervision.messages import Message, in_background, receive, send
from supervision.patience import patience_of
from supervision.traces import close_stacks, open_stacks, where_main_thread_is, write_traces
from supervision.verdict import Report, State, Verdict, judge, judge_lost, names_of
from utils.host_memory import HostMemory, killed_since, read_host_memory
from utils.log_clock import stamped
from utils.printing import print_line
from utils.torch_internals import set_timeout

T = TypeVar("T")


class Watchdog:
    """Watches this rank and the others from a thread of its own. It does nothing in a run of one process."""

    def __init__(self, env: Environment) -> None:
        self.env, self.patience = env, patience_of(env)
        self.main_thread = MainThread()
        self._traces: Path | None = None
        self._before_leaving: Callable[[], None] = lambda: None
        self._was_signalled: Callable[[], bool] = lambda: False
        self._not_of_main_thread: list[dist.ProcessGroup] = []
        self._state: State = "running"
        self._memory_before: HostMemory | None = None  # when the run began
        self._last: dict[int, Report] = {}  # the ranks' last reports, as far as this one gets them
        self._failing: tuple[int, ...] = ()  # the ranks that hold an error, as far as rank 0 has heard
        self._thread: threading.Thread | None = None
        self._woken, self._told_by_others = threading.Event(), threading.Event()
        self._is_told = False  # another rank has told its error; a launcher may still have to see that one end

    def start(self, step_timeout_seconds: int | None) -> None:
        """Watch from now on. Every rank must call this, right after the process group has started."""
        self.main_thread = MainThread(step_timeout_seconds, self.patience)
        self._memory_before = read_host_memory()
        if self.env.world_size > 1:
            with connecting():
                group = dist.new_group(backend="gloo", timeout=timedelta(minutes=CONNECT_MINUTES))
            # Never reached: a timeout inside gloo would close this rank's connections to all others.
            set_timeout(group, timedelta(seconds=2 * self.patience.long_seconds))
            self._thread = threading.Thread(target=self._watch, args=(group, open_stacks()), daemon=True)
            self._thread.start()

    def leave_traces_in(self, folder: Path) -> None:
        """Let a hang leave stacks and last collectives in this folder."""
        self._traces = folder

    def leave_out(self, group: dist.ProcessGroup) -> None:
        """Do not count this group's collectives: another thread enters them, so they tell nothing of the main one."""
        self._not_of_main_thread.append(group)

    @contextlib.contextmanager
    def during_run(self, *, before_leaving: Callable[[], None], was_signalled: Callable[[], bool]) -> Iterator[None]:
        """A context for the loop.

        Args:
            before_leaving: called if the main thread cannot end by itself.
            was_signalled: whether a launcher would have ended this process by now.
        """
        self._before_leaving, self._was_signalled = before_leaving, was_signalled
        try:
            yield
        finally:
            self._before_leaving = lambda: None  # it would hold the model while the process group ends

    def at(self, step: int, activity: str) -> None:
        """Note where the main thread is: in `step` ("training"), or doing something else after it."""
        self.main_thread.at(step, activity)

    def where(self) -> tuple[int, str]:
        """The step that the main thread is at, and what it does there, as `at` was told."""
        position = self.main_thread.position
        return position.step, position.activity

    def each(self, items: Iterable[T], step: int, activity: str) -> Iterator[T]:
        """The items. Each of them counts as a move of the main thread."""
        for item in items:
            self.at(step, activity)
            yield item

    def killed(self) -> str:
        """Says that the kernel has killed processes of this machine for want of memory; "" if it has not."""
        return killed_since(self._memory_before)

    def stop(self) -> None:
        """The run has finished: wait until every rank says so."""
        self._enter("finished")
        if self._thread is not None:
            self._thread.join()

    def others_have_told(self) -> bool:
        """Whether another rank has told the user why the run ends, as far as this one has heard.

        If so, this waits: a launcher reports the first rank that ends.
        """
        return self._is_told and self._told_by_others.wait(self.patience.grace_seconds)

    def others_tell(self, seconds: float) -> bool:
        """Let the other ranks speak first, for so long: this one holds an error. True if the user has been told.

        If several ranks wait so, the first of them then speaks, and the others wait once more.
        """
        self._enter("failing")
        if self._told_by_others.wait(seconds):
            return True
        return self.env.rank > min(self._failing, default=self.env.rank) and self._told_by_others.wait(seconds)

    def has_told(self, *, refused: bool) -> None:
        """Note that this rank has told the user why the run ends, so that the others need not.

        Args:
            refused: the run is refused, so the others end with that status, too.
        """
        self._enter("refused" if refused else "told")
        if self._thread is not None:
            self._thread.join(3 * self.patience.interval_seconds)

    def _enter(self, state: State) -> None:
        self._state = state
        self._woken.set()

    def _watch(self, group: dist.ProcessGroup, stacks: IO[bytes]) -> None:
        """The thread: rounds until the run ends."""
        interval_seconds = self.patience.interval_seconds
        stillness, verdict = Stillness(interval_seconds), Verdict("go")
        wait_seconds = 0.0  # the first round is at once, so that the memory of a rank that is killed soon is known
        while verdict.kind == "go":
            if self._woken.wait(wait_seconds):
                time.sleep(0.02)  # the end has begun: look often
            position = self.main_thread.position
            report = Report(
                state=self._state,
                place=str(position),
                where=where_main_thread_is()[:120],
                num_collectives=num_collectives(leaving_out=[group, *self._not_of_main_thread]),
                still_seconds=stillness.seconds(position),
                limit_seconds=self.main_thread.limit_seconds(),
                resident_bytes=psutil.Process().memory_info().rss,
            )
            self._last[self.env.rank] = report
            verdict = (self._lead if self.env.is_rank_zero else self._follow)(group, report)
            self._failing = tuple(verdict.ranks)
            # Once a rank holds an error, all look often: they end as soon as it has been told.
            wait_seconds = 0.1 if self._failing else interval_seconds
        faulthandler.cancel_dump_traceback_later()
        if verdict.kind in ("over", "refused"):
            self._end(verdict)
        elif verdict.kind == "hang":
            self._end_hang(verdict, stacks)
        close_stacks(stacks)

    def _lead(self, group: dist.ProcessGroup, report: Report) -> Verdict:
        """Rank 0's round: every rank's report, then one verdict for all."""
        others = range(1, self.env.world_size)
        receiving = {rank: in_background(receive, group, rank, Report) for rank in others}
        lost = self._lost(receiving, report, margin_seconds=30)  # shorter than the others' wait for this rank's verdict
        if lost:
            verdict = judge_lost(lost, report.place, self._last)
        else:
            self._last |= {rank: received.result() for rank, received in receiving.items()}
            verdict = judge([report, *(self._last[rank] for rank in others)], self.patience)
        message = replace(verdict, message="")  # rank 0 prints it; the others print only what they find themselves
        wait([in_background(send, group, rank, message) for rank in others if rank not in lost], timeout=30)
        return verdict

    def _follow(self, group: dist.ProcessGroup, report: Report) -> Verdict:
        """The round of any other rank."""

        def exchange() -> Verdict:
            send(group, 0, report)
            return receive(group, 0, Verdict)

        answer = in_background(exchange)
        lost = self._lost({0: answer}, report, margin_seconds=60)
        return judge_lost(lost, report.place) if lost else answer.result()

    def _lost(
        self, transfers: Mapping[int, Future[Message]], report: Report, *, margin_seconds: float
    ) -> dict[int, float | None]:
        """Wait for transfers with other ranks, and find the ranks that are lost.

        Returns:
            The ranks whose connection has closed, with None. If there are none, those that have been silent for longer
            than any may be, with the seconds. Empty when all transfers are done.
        """
        interval_seconds = self.patience.interval_seconds
        waited = 0.0  # time in which this process was stopped does not count
        while True:
            # If even this thread is held up, a thread of C prints the stacks to stderr.
            faulthandler.dump_traceback_later(report.limit_seconds + 15, file=2)
            _, pending = wait(transfers.values(), timeout=interval_seconds, return_when=FIRST_EXCEPTION)
            closed = [
                rank for rank, transfer in transfers.items() if transfer.done() and transfer.exception() is not None
            ]
            if closed or not pending:
                return dict.fromkeys(closed)
            waited += interval_seconds
            if waited > report.limit_seconds + margin_seconds:
                return {rank: waited for rank, transfer in transfers.items() if transfer in pending}

    def _end(self, verdict: Verdict) -> None:
        """End this rank, since another is gone or has told its error. A launcher may do and say so first.

        A launcher does not say that host memory ran out, so that is said at once, by one rank of the machine.
        """
        if self._state in ("told", "refused"):
            return
        status = REFUSED if verdict.kind == "refused" else FAILED
        self._is_told = not verdict.ranks
        if self._state == "finished" and verdict.ranks:
            return  # a rank that was killed after the end was written: the results are whole
        first = self.env.rank - self.env.local_rank  # of this machine
        on_machine = range(first, first + self.env.local_world_size)
        if set(verdict.ranks).intersection(on_machine) and (killed := self.killed()):
            if self.env.rank == min(set(on_machine).difference(verdict.ranks)):
                place = f"{names_of(verdict.ranks)} ended {self.main_thread.position}"
                print_line(f"\nerror: {place}: {killed}{verdict.last_seen}", to_stderr=True)
            verdict = replace(verdict, message="")
        main_ends_by_itself = self._state == "failing"
        if not main_ends_by_itself:
            self._write_end()
        if verdict.ranks or not main_ends_by_itself:
            grace = self.patience.grace_seconds
            self._let_launcher_end_it(grace if verdict.ranks else grace / 2, status, verdict)
        self._say(verdict)
        self._told_by_others.set()
        if not main_ends_by_itself:
            if status == REFUSED:
                hand_refusal_over(self.env.refusal_file)
            leave(status)

    def _let_launcher_end_it(self, seconds: float, status: int, verdict: Verdict) -> None:
        """Wait for the SIGTERM of a launcher that has seen a rank end. The loop takes it for a request to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._was_signalled():
                if verdict.ranks and self._speaks():
                    line = f"{names_of(verdict.ranks)} ended: this rank ends, too, without a checkpoint"
                    print_line("\n" + "\n".join(stamped(line)), to_stderr=True)
                leave(status)
            time.sleep(0.1)

    def _end_hang(self, verdict: Verdict, stacks: IO[bytes]) -> NoReturn:
        """Leave traces and end the process from this thread: the main thread may be stuck anywhere."""
        place = ""
        if self._traces is not None:
            try:
                write_traces(self._traces, self.env.rank, stacks)
                place = f". Stacks and last collectives of the ranks: {self._traces}"
            except OSError as error:
                place = f". No traces: {error}"
        self._say(replace(verdict, message=verdict.message and verdict.message + place))
        self._write_end()
        # Ranks at fault end first, for a launcher reports the first to end. All have time to write their traces.
        time.sleep(self.patience.traces_seconds * (1 if self.env.rank in verdict.ranks else 2))
        leave(FAILED)

    def _speaks(self) -> bool:
        return self.env.rank in (0, 1) or self.env.local_rank == 0

    def _say(self, verdict: Verdict) -> None:
        """Print the message on rank 0, and on one rank of each other machine, since rank 0 may be gone."""
        if verdict.message and self._speaks():
            print_line(f"\nerror: {verdict.message}", to_stderr=True)

    def _write_end(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not keep the process
            self._before_leaving()
