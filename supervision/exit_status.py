"""What a process ends with, and how it ends at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn

REFUSED, FAILED = 2, 1
GRACE_SECONDS = 10  # for a launcher to end all ranks, and for rank 0 to speak for all


def leave(status: int) -> NoReturn:
    """End this process at once: no exit handler may wait for ranks that are gone, nor for threads that are stuck."""
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
