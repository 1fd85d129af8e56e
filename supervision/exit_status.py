"""Exit statuses, and how a process ends at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

REFUSED, FAILED = 2, 1
_HAND_OVER_SECONDS = 30.0


def let_ctrl_c_end_this() -> None:
    """Let Ctrl-C end this process as SIGTERM does, until the loop takes requests to stop (supervision/stopping.py).

    Python's own handler raises KeyboardInterrupt, but not before the main thread runs Python code again. One that waits
    for other ranks may run none for half an hour.
    """
    # Not if it is ignored, as in processes that a shell without job control starts in the background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def hand_refusal_over(file: Path | None, *, wait: bool = True) -> None:
    """Make the file for which tools/start_node.sh looks, and wait until it has ended torchrun.

    torchrun starts ranks again whatever their exit status was. Refused ones would be refused again.

    Args:
        file: None if another launcher started this process.
        wait: False if torchrun is already ending its ranks.
    """
    if file is None:
        return
    launcher, deadline = os.getppid(), time.monotonic() + _HAND_OVER_SECONDS
    with contextlib.suppress(OSError):
        file.touch()
        while wait and os.getppid() == launcher and time.monotonic() < deadline:
            time.sleep(0.1)


def leave(status: int) -> NoReturn:
    """End this process at once. Exit handlers would wait for ranks that are gone, or for threads that are stuck."""
    workers = multiprocessing.active_children()  # os._exit skips the handler that would end them
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Last: torch has the main thread, which may wait for this one, raise an error once it hears of a killed worker.
    for worker in workers:
        worker.kill()
    os._exit(status)
