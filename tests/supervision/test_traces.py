"""Where threads are, as another thread sees it."""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from supervision.traces import where_main_thread_is, write_traces
from tests.helpers.processes import ProcessGroup


def wait_somewhere(done: threading.Event) -> None:
    done.wait(60)  # which waits in a library


def test_another_thread_sees_the_line_of_our_own_code_that_the_main_thread_is_at(tmp_path: Path) -> None:
    done, found = threading.Event(), []

    def look() -> None:
        while not found or "in wait_somewhere: done" not in found[-1]:
            found.append(where_main_thread_is())
        with tempfile.TemporaryFile() as scratch:
            write_traces(tmp_path, 3, scratch)
        done.set()

    thread = threading.Thread(target=look, name="the looking one")
    thread.start()
    wait_somewhere(done)
    thread.join(60)
    number = wait_somewhere.__code__.co_firstlineno + 1
    assert found[-1] == f"test_traces.py:{number} in wait_somewhere: done.wait(60)  # which waits in a library"
    lines = (tmp_path / "stack-rank-3.txt").read_text().splitlines()
    assert lines[1] == "MainThread (most recent call first)"
    place = next(index for index, line in enumerate(lines) if line.endswith(f"line {number} in wait_somewhere"))
    assert lines[place + 1] == "    done.wait(60)  # which waits in a library"
    assert "the looking one" not in "".join(lines)


class Garbage:
    """Objects in a cycle, whose end runs Python code."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(number for number in range(20))


def look_while_threads_come_and_go(seconds: float) -> None:
    """For so long: native threads that enter Python and leave it, frames and garbage, and a thread that looks."""
    end = time.monotonic() + seconds
    libc = ctypes.CDLL(None)
    entry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

    def start_native_threads() -> None:
        while time.monotonic() < end:
            thread = ctypes.c_ulong()
            assert libc.pthread_create(ctypes.byref(thread), None, entry, None) == 0
            libc.pthread_join(thread, None)

    def look() -> None:
        while time.monotonic() < end:
            assert where_main_thread_is()

    def descend(depth: int) -> None:
        garbage = Garbage()
        if depth and garbage:
            descend(depth - 1)

    sys.setswitchinterval(1e-5)
    gc.set_threshold(50)
    threads = [threading.Thread(target=target) for target in (start_native_threads, look)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        descend(40)
    for thread in threads:
        thread.join()
    assert gc.isenabled()


@pytest.mark.parametrize("seconds", [1, pytest.param(4, marks=pytest.mark.full)])
def test_looking_often_neither_crashes_nor_waits_for_ever(seconds: float, process_group: ProcessGroup) -> None:
    (outcome,) = process_group.run(partial(look_while_threads_come_and_go, seconds), world_size=1, timeout_seconds=60)
    assert outcome.status == 0, outcome.stderr
    assert "Error" not in outcome.stderr  # of a thread
