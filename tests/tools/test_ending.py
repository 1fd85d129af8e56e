"""How tools end."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.helpers.processes import ROOT

# A shell starts what runs in its background, such as these tests, with SIGINT ignored, and children inherit that.
WORK = """
import signal, time
from tools.ending import status_of
signal.signal(signal.SIGINT, signal.default_int_handler)
def work():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
status_of(work)
"""


def test_ctrl_c_ends_a_tool_without_a_word_once_it_has_cleaned_up() -> None:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", WORK], **given) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "begun\n"
        tool.send_signal(signal.SIGINT)
        assert tool.communicate(timeout=60) == ("cleaned up\n", "")
        assert tool.returncode == -signal.SIGINT
