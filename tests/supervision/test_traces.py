"""Where threads are, as another thread sees it."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from supervision.traces import where_main_thread_is, write_traces


def wait_somewhere(done: threading.Event) -> None:
    done.wait(60)  # which waits in a library


def test_another_thread_sees_the_line_of_our_own_code_that_the_main_thread_is_at(tmp_path: Path) -> None:
    done, found = threading.Event(), []

    def look() -> None:
        with tempfile.TemporaryFile() as scratch:
            while not found or "wait_somewhere" not in found[-1]:
                found.append(where_main_thread_is(scratch))
            scratch.seek(0)
            found.append(scratch.read().decode())
            write_traces(tmp_path, 3, scratch)
        done.set()

    thread = threading.Thread(target=look, name="the looking one")
    thread.start()
    wait_somewhere(done)
    thread.join(60)
    *_, where, left = found
    assert where == "test_traces.py:13 in wait_somewhere: done.wait(60)  # which waits in a library"
    assert left == ""
    lines = (tmp_path / "stack-rank-3.txt").read_text().splitlines()
    assert lines[1] == "MainThread (most recent call first)"
    place = next(index for index, line in enumerate(lines) if line.endswith("line 13 in wait_somewhere"))
    assert lines[place + 1] == "    done.wait(60)  # which waits in a library"
    assert "the looking one" not in "".join(lines)
