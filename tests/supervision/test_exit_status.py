"""How a process ends at once, from a thread that is not its main one."""

import contextlib
import subprocess
import sys

import psutil

from tests.helpers.processes import ROOT, assert_all_gone

LEAVE = """
import multiprocessing, os, signal, sys, threading, time
from supervision.exit_status import leave

class Slow:
    def flush(self):
        time.sleep(0.5)

worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
worker.start()
print(worker.pid, flush=True)
signal.signal(signal.SIGCHLD, lambda *_: os.write(2, b"the main thread heard of its worker's end"))
sys.stdout = Slow()
threading.Thread(target=leave, args=(3,)).start()
threading.Event().wait(20)
"""


def test_workers_end_with_the_process_and_the_main_thread_does_not_hear_of_it():
    command = [sys.executable, "-c", LEAVE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    with contextlib.suppress(psutil.NoSuchProcess):
        assert_all_gone([psutil.Process(int(done.stdout))])
