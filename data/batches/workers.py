"""DataLoader workers and signals: workers ignore a request to stop; the main process handles it.

Ctrl-C and `scancel` reach every process of a run. With torch's handlers a worker would end at once, and the main
process would fail at its next batch instead of saving.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextlib.contextmanager
def stop_signals_held_back() -> Iterator[None]:
    """Start workers in this context: they inherit blocked signals, in every thread, whether forked or spawned.

    This process receives the signals afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch_parent(worker: int) -> None:
    """A `worker_init_fn` for such workers: end when the main process sends SIGTERM, or has ended.

    torch's worker checks for its parent between batches only. At its end it waits for the parent to read what it has
    sent, and a killed parent reads nothing.
    """
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        threading.Thread(target=_end_with, args=(main_process.pid,), daemon=True).start()


def _end_with(main_process: int | None) -> None:
    """Args: main_process: noted before this process was started. Its own view of its parent may be of a later one."""
    while os.getppid() == main_process:
        received = signal.sigtimedwait(STOP_SIGNALS, 1.0)
        if received and received.si_signo == signal.SIGTERM and received.si_pid == main_process:
            os._exit(0)  # as torch's handler does; the DataLoader so ends a worker that reads for too long
    os._exit(1)
