"""benchmarks/planned_memory.py on a CPU: cut into calls, with plans next to what was measured."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.planned_memory import CASES, main
from tests.helpers.processes import ProcessGroup

ROWS = ["4", "11", "20"]  # SGD in bf16; QLoRA; two ranks that keep whole weights, padded


def by_forks(flags: Sequence[str], nproc: int, seconds: float) -> str:
    outcomes = ProcessGroup().run(flags, nproc, timeout_seconds=300)
    return "".join(outcome.stderr for outcome in outcomes if outcome.status)


def test_the_rows_are_as_many_and_of_all_kinds() -> None:
    assert len(CASES) == 24
    words = {word for case in CASES for word in (*case.flags.split(), case.shape, str(case.nproc))}
    assert words >= {"off", "full", "selective", "4bit", "--use_peft", "--pure_bf16", "--mixed_precision", "AdamW8bit"}
    assert words >= {"SGD", "NO_SHARD", "SHARD_GRAD_OP", "padding", "tinyllama", "llama8b", "1", "4"}


@pytest.mark.slow
def test_a_call_goes_on_where_the_one_before_ended_and_the_plans_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--folder", str(tmp_path), "--shape", "tiny-words", "--nproc", "2", "--length", "128", "--rows", *ROWS]
    calls: list[Sequence[str]] = []

    def counted(flags: Sequence[str], nproc: int, seconds: float) -> str:
        calls.append(flags)
        if len(calls) == 2:
            raise subprocess.TimeoutExpired("finetuning.py", seconds)
        return by_forks(flags, nproc, seconds)

    assert main(argv, counted) == 1
    assert "1 of 3 run; 1 within 10%" in capsys.readouterr().out
    assert main(argv, counted) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "3 within 15%" in printed
    assert main(argv, counted) == 0
    assert len(calls) == len(ROWS) + 1, "what has finished is read, what had no time begins again"
    assert main(["--folder", str(tmp_path / "other"), "--seconds", "0", "--rows", *ROWS], counted) == 1
    assert len(calls) == len(ROWS) + 1, "no time, no run"
