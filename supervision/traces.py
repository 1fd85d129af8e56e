"""Writes what a hang leaves in RUN/traces: every rank's Python stacks, and the collectives that it last entered."""

from __future__ import annotations

import faulthandler
import linecache
import multiprocessing
import os
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from utils.torch_internals import recorded_collectives

_STACKS_SIGNAL = signal.SIGUSR2
TRACE_FILES = {"nccl": "nccl-rank-{rank}", "gloo": "gloo-rank-{rank}.json"}
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def open_stacks() -> IO[bytes]:
    """A file without a name, for the stacks of this process and of the DataLoader workers that it forks later.

    They inherit the file and the handler that writes to it. A run that does not hang leaves nothing behind.
    """
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close_stacks)
    faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=True)
    return stacks


def close_stacks(stacks: IO[bytes]) -> None:
    faulthandler.unregister(_STACKS_SIGNAL)
    stacks.close()


def write_traces(folder: Path, rank: int, stacks: IO[bytes]) -> None:
    """Write `stack-rank-N.txt` and what torch recorded of the last collectives.

    Raises:
        OSError: if the folder cannot be written.
    """
    text = _python_stacks()
    for worker in multiprocessing.active_children():
        os.write(stacks.fileno(), f"\nDataLoader worker, process {worker.pid}\n".encode())
        os.kill(worker.pid or 0, _STACKS_SIGNAL)
        time.sleep(0.5)  # it writes them itself, whatever it does at the moment
    stacks.seek(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"stack-rank-{rank}.txt").write_bytes(text.encode() + stacks.read())
    for backend, trace in recorded_collectives().items():
        (folder / TRACE_FILES[backend].format(rank=rank)).write_bytes(trace)


def _python_stacks() -> str:
    """The stack of every thread but the calling one, the main thread first."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = dict(sys._current_frames())
    frames.pop(threading.get_ident())
    main = threading.main_thread().ident
    parts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        parts += [f"\n{threads.get(ident, 'a thread of C++')} (most recent call last)\n"]
        parts += traceback.format_stack(frames[ident])
    return "".join(parts)


def where_main_thread_is() -> str:
    """The line of code that the main thread is at: the innermost one outside of libraries."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its main thread has ended"
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(path).name}:{line} in {frame.f_code.co_name}: {linecache.getline(path, line).strip()}"
