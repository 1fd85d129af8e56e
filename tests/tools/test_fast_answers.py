"""Tools show their help and refuse a wrong command line before imports that take seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.processes import ROOT, process_variables
from tools.serving.checks import CHECKS
from tools.serving.export_flags import PROGRAMS

TOOLS = ("chat", "demo", "doctor", "export", "generate", "launch", "make_tiny_model", "memory_table", "plan", "report")
TOOLS += ("teacher_logprobs",)
SCRIPT = """
import runpy, sys
name = sys.argv.pop(1)
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
finally:
    print("torch" in sys.modules, "transformers" in sys.modules)
"""


def answer(tool: str, *flags: str) -> tuple[int, str, str]:
    """Exit status, the last line of standard output, and standard error."""
    command = [sys.executable, "-c", SCRIPT, f"tools.{tool}", *flags]
    given = {"cwd": ROOT, "env": process_variables({}), "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=120, **given)
    return done.returncode, done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_help_does_not_wait_for_torch(tool: str) -> None:
    status, imported, _ = answer(tool, "--help")
    assert (status, imported) == (0, "False False")


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("generate x --prompt a --seed -1", "error: --seed: -1 is not from 0"),
        ("chat x --max_new_tokens 0", "error: --max_new_tokens: 0 is not from 1"),
        ("export x --merge", "error: --merge: it is for a new folder"),
        ("export x --to y --public", "error: --public: it belongs to --push_to_hub"),
        ("make_tiny_model --out x --num_heads 5", "error: --num_heads: --hidden_size 128 must be"),
        ("memory_table", "the following arguments are required: MODEL"),
    ],
)
def test_a_refusal_does_not_wait_for_torch(line: str, refusal: str) -> None:
    status, imported, shown = answer(*line.split())
    assert (status, imported) == (2, "False False")
    assert refusal in shown


def test_the_programs_that_export_names_are_those_it_checks() -> None:
    assert CHECKS.keys() == set(PROGRAMS)
