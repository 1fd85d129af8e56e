"""benchmarks.kill_and_resume with two kills."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.processes import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "flags"), [("1", []), ("2", ["--async_save", "True"])])
def test_a_run_that_is_killed_and_resumed_is_the_run_left_alone(ranks: str, flags: list[str]) -> None:
    words = [sys.executable, "-m", "benchmarks.kill_and_resume", "--kills", "2", "--ranks", ranks]
    ended = subprocess.run([*words, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 kills: equal to the uninterrupted run, bit for bit" in ended.stdout
