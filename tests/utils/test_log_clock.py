"""Lines of a run's log: each says when it was printed."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest

import utils.log_clock
from ranks.environment import lone_process, print_rank_zero
from tests.helpers.processes import run_command
from utils.log_clock import LogClock, timed_log
from utils.printing import print_line


def test_the_date_stands_at_the_start_and_after_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [datetime(2026, 3, 1, 23, 59, 57).astimezone()]

    class Clock:
        @staticmethod
        def now() -> datetime:
            return now[0]

    monkeypatch.setattr(utils.log_clock, "datetime", Clock)
    clock, lines = LogClock(), []
    for line in ("first", "second", "third"):
        lines += clock.stamped(line)
        now[0] += timedelta(seconds=1.5)
    times = [line[:8] for line in lines]
    assert [line[9:] for line in lines] == [
        f"2026-03-01 {now[0].astimezone().tzname()}",
        "first",
        "second",
        f"2026-03-02 {now[0].astimezone().tzname()}",
        "third",
    ]
    assert times == sorted(times[:3]) + sorted(times[3:])


def test_lines_have_their_time_in_a_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("before")
    with timed_log():
        print_line("a line")
        print_rank_zero(lone_process(), "another", "", "a table\n  and its row")
        print_line("error: at once", to_stderr=True)
    print_line("after")
    printed = capsys.readouterr()
    assert printed.err == "error: at once\n"
    time = r"\d\d:\d\d:\d\d"
    lines = ["before", rf"{time} \d{{4}}-\d\d-\d\d \S+", f"{time} a line", f"{time} another", ""]
    lines += [f"{time} a table", "  and its row", "after", ""]
    assert re.fullmatch("\n".join(lines), printed.out)


def test_every_line_of_a_run_has_its_time_and_no_step_is_wider_than_120_columns(
    tiny_model: Path, samples: Path, tmp_path: Path
) -> None:
    flags = ["--samsum_dataset.data_path", str(samples), "--output_dir", str(tmp_path / "run"), "--split_slice", "5%"]
    done = run_command("--model_name", str(tiny_model), *flags, "--max_train_step", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    steps = [line for line in lines if re.match(r"\d\d:\d\d:\d\d step \d/2 \| loss ", line)]
    assert len(steps) == 2, done.stdout
    assert max(map(len, steps)) <= 120
    for start in ("eval | step 2", "Epoch 1: ", "checkpoint | step 2", "loading weights: ", "finished: "):
        (line,) = [line for line in lines if start in line]
        assert re.match(rf"\d\d:\d\d:\d\d {re.escape(start)}", line), line
