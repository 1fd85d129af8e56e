"""Standard output and standard error that never fail: a run outlives its terminal, its log's disk and its reader.

A write that the system refuses (the reader of a pipe has gone, the disk under a log file is full, the terminal has
vanished, the descriptor was closed) is dropped. What a run has to leave is in its folder, not in its log.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO


def keep_standard_streams() -> None:
    """Let no print fail from now on, whoever prints. For the start of a script, before anyone keeps a stream."""
    keep_standard_descriptors()
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)


def keep_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, on nothing.

    Else the next file that is opened gets the number, and what libraries print in C goes into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free: this one


def take_standard_output() -> TextIO:
    """Standard output for the caller alone. From now on all other prints go to standard error, those of C libraries
    and of processes that are started later, too.
    """
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    return _Stream(_Descriptor(own, "wb", closefd=False), encoding="utf-8", line_buffering=True)


def refusal() -> str:
    """Why something that was printed to standard output is lost; empty if nothing is, or if its reader chose to go."""
    raw = getattr(sys.stdout, "buffer", None)
    return raw.refusal if isinstance(raw, _Descriptor) else ""


def _stream(number: int, before: Any) -> io.TextIOWrapper:
    """A stream in the place of `before`, which is None if the process was started without one."""
    raw = _Descriptor(number, "wb", closefd=False)
    options: dict[str, Any] = {"line_buffering": raw.isatty() or number == 2}
    if isinstance(before, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            before.flush()
        options = {name: getattr(before, name) for name in ("encoding", "line_buffering", "write_through")}
    # A file name may hold bytes that are no text, and a log may take ASCII alone.
    return _Stream(raw, errors="backslashreplace", **options)


class _Descriptor(io.FileIO):
    """Writes everything or, if the system refuses, drops it."""

    refusal = ""

    def write(self, data: Any, /) -> int:
        try:
            rest = memoryview(data).cast("B")
            while rest:
                written = super().write(rest)
                if written is None:  # another program has made the terminal non-blocking
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except BrokenPipeError:  # the reader chose to go, so nothing is lost to anyone
            pass
        except OSError as error:
            self.refusal = error.strerror or str(error)
        return len(data)

    def close(self) -> None:
        """Stay open: others still print."""


class _Stream(io.TextIOWrapper):
    def close(self) -> None:
        """Stay open: others still print."""
        self.flush()
