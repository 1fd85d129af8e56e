"""benchmarks.kill_and_resume with two kills, its ranks forked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from benchmarks.kill_and_resume import main
from tests.helpers.forked import Fork
from tests.helpers.processes import ROOT, process_variables


def fork(argv: Sequence[str], *, env: dict[str, str], stdout: IO[str], stderr: IO[str]) -> Fork:
    """As subprocess.Popen starts `[python, script, ...]`."""
    given = {"stdout": stdout.fileno(), "stderr": stderr.fileno()}
    return Fork(argv[1:], cwd=ROOT, environment=process_variables(env), **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"), [pytest.param("1", [], marks=pytest.mark.full), ("2", ["--async_save", "True"])]
)
def test_a_run_that_is_killed_and_resumed_is_the_run_left_alone(
    ranks: str,
    flags: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.kill_and_resume.Popen", fork)
    status = main(["--kills", "2", "--ranks", ranks, "--folder", str(tmp_path), *flags])
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert "2 kills: equal to the uninterrupted run, bit for bit" in printed.out
