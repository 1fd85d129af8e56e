"""Forked processes are as separate as real ones, and no client brings the server down."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.forked import ONE_THREAD, Fork
from tests.helpers.processes import run_forked


def start(code: str, process_group: int = 0) -> Fork:
    how = {"cwd": Path.cwd(), "environment": os.environ | ONE_THREAD, "process_group": process_group}
    with open(os.devnull, "w") as nothing:
        return Fork(["-c", code], stdout=nothing.fileno(), stderr=nothing.fileno(), **how)


def test_a_fork_has_its_own_folder_environment_arguments_and_status(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['A'], sys.argv, __name__); sys.exit(3)"
    done = run_forked(["-c", code, "--flag"], cwd=tmp_path, variables={"A": "b"})
    assert (done.returncode, done.stdout) == (3, f"{tmp_path} b ['-c', '--flag'] __main__\n")


def test_an_exception_is_printed_and_exit_handlers_run() -> None:
    done = run_forked(["-c", "import atexit; atexit.register(print, 'the end'); 1 / 0"])
    assert (done.returncode, done.stdout) == (1, "the end\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_end_it_as_they_end_a_process(number: signal.Signals, tmp_path: Path) -> None:
    fork = start(f"import time; open({str(tmp_path / 'began')!r}, 'w'); time.sleep(60)")
    deadline = time.monotonic() + 300
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(fork.pid, number)
    assert fork.wait(60) == -number


def test_forks_differ_in_their_random_numbers() -> None:
    code = "import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    first, second = (run_forked(["-c", code]).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


def test_a_variable_that_libraries_read_at_import_is_refused() -> None:
    done = run_forked(["-c", "pass"], variables={"PYTHONPATH": "/nowhere"})
    assert done.returncode == 1
    assert "this needs a real process" in done.stderr


def test_clients_that_go_without_a_word_leave_the_server_running() -> None:
    leader = start("import time; time.sleep(60)")
    for _ in range(5):
        start("pass", process_group=leader.pid)._connection.close()
    member = start("import time; time.sleep(60)", process_group=leader.pid)
    assert os.getpgid(member.pid) == leader.pid
    os.killpg(leader.pid, signal.SIGKILL)
    assert [leader.wait(60), member.wait(60)] == [-signal.SIGKILL] * 2
    assert not psutil.pid_exists(leader.pid)
    late = start("pass", process_group=leader.pid)  # a group that is gone
    assert late.wait(60) == 0
