"""DataLoader workers and signals: a request to stop is the main process's affair, whoever else receives it.

Ctrl-C and `scancel` reach every process of a run. Left to torch's handlers a worker would end there and then, and the
main process would fail at its next batch instead of saving.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals_held_back() -> Iterator[None]:
    """Start workers in here: they begin with these signals blocked, in every thread, however they are started.

    To this process they are delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch_parent(worker: int) -> None:
    """In a worker that was started so (`worker_init_fn`): end when the main process says so, or has ended.

    torch's own worker looks for its parent between batches only, and at its end waits for the parent to read what it
    has sent; a parent that was killed reads nothing.
    """
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(started_by: int) -> None:
    main_process = multiprocessing.parent_process()
    while os.getppid() == started_by:
        received = signal.sigtimedwait(STOP_SIGNALS, 1.0)
        if received and received.si_signo == signal.SIGTERM and main_process and received.si_pid == main_process.pid:
            os._exit(0)  # as torch's handler does; the DataLoader ends a worker this way that reads for too long
    os._exit(1)
