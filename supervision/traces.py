"""Writes RUN/traces after a hang: every rank's Python stacks, and the collectives that it last entered."""

from __future__ import annotations

import faulthandler
import gc
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
from types import FrameType
from typing import IO, NamedTuple

from utils.torch_internals import recorded_collectives

_STACKS_SIGNAL = signal.SIGUSR2
TRACE_FILES = {"nccl": "nccl-rank-{rank}", "gloo": "gloo-rank-{rank}.json"}
_LIBRARIES = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def open_stacks() -> IO[bytes]:
    """A file without a name, for the stacks of this process and of the DataLoader workers that it forks later.

    They inherit the file and the handler that writes to it. A run that does not hang leaves no file.
    """
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close_stacks)
    faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=True)
    return stacks


def close_stacks(stacks: IO[bytes]) -> None:
    faulthandler.unregister(_STACKS_SIGNAL)
    stacks.close()


def write_traces(folder: Path, rank: int, stacks: IO[bytes]) -> None:
    """Write `stack-rank-N.txt` and torch's records of the last collectives.

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


class Frame(NamedTuple):
    file: str
    line: int
    function: str


def _frames_of_threads() -> dict[int, list[Frame]]:
    """The frames of each thread of Python, the innermost first, by the thread's ident.

    No garbage is collected meanwhile. In Python 3.11 a collection may start while these objects are made, and then let
    other threads go on, whose frames are freed: the process crashes, or waits for ever (python/cpython#106883). From
    3.12 on it starts between instructions alone. faulthandler is no way out: it reads the list of threads without its
    lock, and crashes on one that native code has just begun.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return {ident: _frames_from(frame) for ident, frame in sys._current_frames().items()}
    finally:
        if collects:
            gc.enable()


def _frames_from(innermost: FrameType) -> list[Frame]:
    return [
        Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name)
        for frame, line in traceback.walk_stack(innermost)
    ]


def _python_stacks() -> str:
    """The stack of every thread but the calling one, the main thread first."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = _frames_of_threads()
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    parts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        parts.append(f"\n{threads.get(ident, 'a thread of C++')} (most recent call first)\n")
        for file, line, function in frames[ident]:
            parts.append(f'  File "{file}", line {line} in {function}\n')
            parts += [f"    {code}\n"] if (code := linecache.getline(file, line).strip()) else []
    return "".join(parts)


def where_main_thread_is() -> str:
    """The line of code that the main thread is at: the innermost one outside of libraries."""
    frames = _frames_of_threads().get(threading.main_thread().ident or 0, [])
    own = (frame for frame in frames if not frame.file.startswith(("<", *_LIBRARIES)))
    found = next(own, frames[0] if frames else None)
    if found is None:
        return "its main thread has ended"
    file, line, function = found
    return f"{Path(file).name}:{line} in {function}: {linecache.getline(file, line).strip()}"
