"""benchmarks/out_of_memory.py on a device of some KiB: runs that run out of memory, and what they say."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.out_of_memory import NotProvokedError, flags_of, provoke, provoke_all
from tests.helpers.processes import ProcessGroup
from tests.helpers.small_device import on_small_device

OPTIONS = Namespace(length=48, batch=16, chunk=8, val_batch=32, flags="")


def on_cpu(flags: Sequence[str], limit_gib: float) -> subprocess.CompletedProcess[str]:
    (outcome,) = ProcessGroup().run(on_small_device(flags, limit_gib), 1)
    return subprocess.CompletedProcess(flags, outcome.status, outcome.stdout, outcome.stderr)


@pytest.mark.slow
def test_each_phase_is_provoked_and_the_first_command_of_its_account_runs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROW_LENGTH", str(OPTIONS.length))
    monkeypatch.setenv("NUM_ROWS", str(OPTIONS.val_batch))
    rows = list(provoke_all(on_cpu, tiny_model, tmp_path, OPTIONS))
    assert [row["phase"] for row in rows] == ["forward", "backward", "optimizer_step", "evaluation"]
    for row in rows:
        assert float(row["measured peak GiB"]) <= float(row["limit GiB"])
    flags = flags_of("evaluation", tiny_model, tmp_path / "wrong", OPTIONS)
    with pytest.raises(NotProvokedError, match="evaluation: exit 0 and no account"):
        provoke(on_cpu, flags, "evaluation", 1.0)
    limit_gib = float(rows[2]["limit GiB"])
    with pytest.raises(NotProvokedError, match="evaluation: 1 accounts, of optimizer_step"):
        provoke(on_cpu, flags, "evaluation", limit_gib)
