"""The peak of a process's memory is its own, whoever started it."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.processes import ROOT

PEAK = "from utils.host_memory import peak_resident\nprint(peak_resident() // 2**20)"
LARGE = f"""
import subprocess, sys
held = b"x" * (400 * 2**20)
sys.exit(subprocess.run([sys.executable, "-c", {PEAK!r}]).returncode)
"""
OWN = f"held = b'x' * (400 * 2**20)\ndel held\n{PEAK}"


def peak_mib(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_memory_of_the_process_that_started_this_one_does_not_count() -> None:
    assert peak_mib(LARGE) < 200


def test_memory_that_was_given_back_counts() -> None:
    assert 400 < peak_mib(OWN) < 600
