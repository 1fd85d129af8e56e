"""How tools end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from tests.helpers.processes import ROOT
from tools.ending import status_of

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


# Each of these modules waits to be imported, in the place of the real one.
WAITS = """
import time
print("importing", flush=True)
time.sleep(60)
"""
IMPORTS = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# These tools read their words before they import: wrong ones would be refused first. Of the others tools.plan imports
# nothing itself without --find.
WORDS = {
    "tools.chat": "run",
    "tools.demo": "",
    "tools.export": "run --to exported",
    "tools.generate": "run --prompt Hello",
    "tools.make_tiny_model": "--out tiny",
    "tools.memory_table": "tiny",
    "tools.teacher_logprobs": "teacher --to rows",
}
TOOLS = [f"tools.{file.stem}" for file in sorted((ROOT / "tools").glob("*.py")) if "__main__" in file.read_text()]
TOOLS += [f"tools.{file.parent.name}" for file in sorted((ROOT / "tools").glob("*/__main__.py"))]


@pytest.mark.parametrize("tool", TOOLS)
def test_ctrl_c_while_a_tool_imports_is_silent(tool: str, tmp_path: Path) -> None:
    for name in ("torch", "yaml", "jinja2"):
        (tmp_path / f"{name}.py").write_text(WAITS)
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    words = [sys.executable, "-c", IMPORTS, tool, *WORDS.get(tool, "--find").split()]
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(tmp_path)}, **given) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == -signal.SIGINT


def test_ctrl_c_ends_a_tool_without_a_word_once_it_has_cleaned_up() -> None:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", WORK], **given) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "begun\n"
        tool.send_signal(signal.SIGINT)
        assert tool.communicate(timeout=60) == ("cleaned up\n", "")
        assert tool.returncode == -signal.SIGINT


def test_an_error_of_the_disk_is_one_line_and_any_other_stays_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_rust() -> None:
        try:
            safe_open(tmp_path, framework="pt")  # a folder
        except (OSError, SafetensorError) as error:
            raise SafetensorError(f"I/O error: {error}") from error

    assert status_of((tmp_path / "run.yaml").read_text) == 1
    line = f"error: {tmp_path}/run.yaml cannot be read or written (No such file or directory); mend that, and give the "
    assert capsys.readouterr().err == f"{line}same command\n"
    assert status_of(of_rust) == 1
    assert capsys.readouterr().err.startswith("error: a file cannot be read or written (")
    with pytest.raises(ZeroDivisionError):
        status_of(lambda: 1 // 0)


def test_the_home_folder_of_nobody_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(Path("~nosuch/folder").expanduser) == 2
    line = "error: a path begins with ~ and the name of nobody on this machine; write the whole path\n"
    assert capsys.readouterr().err == line
