"""Ranks that fail: every process ends by itself, and the one that failed is named, with its cause, once.

Each case runs as it is on CPU with gloo and on GPUs with NCCL: `pytest -m slow tests/supervision/test_failures.py`.
Ranks wait for each other a fifth of the usual time, but for the case that waits as long as a user's run.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import RunningCommand, assert_all_gone, read_metrics, train_events, wait_until
from tests.helpers.refusals import error_lines

RECIPE = """
import os
import time
from data.batches.rows import Rows

class Planted:
    num_reads = 0

def read_and(rows, index):
    Planted.num_reads += 1
    plant(os.environ["RANK"], Planted.num_reads)
    return read(rows, index)

def sleep_for_ever():
    while True:
        time.sleep(1)

read = Rows.__getitem__
Rows.__getitem__ = read_and

def get_rows(dataset_config, tokenizer, split):
    return [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 1000

"""
HANG_LIMIT_SECONDS = 120  # twice the contract's minute: a busy machine is no failure

Start = Callable[..., RunningCommand]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a run of a thousand steps, one row per rank in each, that calls `plant(rank, num_reads)` for each row."""
    commands: list[RunningCommand] = []

    def start(
        plant: str,
        *flags: str,
        num_workers: bool = False,
        world_size: int = 2,
        torchrun: bool,
        grace_scale: float = 0.2,
    ) -> RunningCommand:
        recipe = tmp_path / "recipe.py"
        recipe.write_text(f"{RECIPE}def plant(rank, num_reads):\n    {plant}\n")
        given = ["--model_name", str(tiny_model), "--dataset", f"{recipe}:get_rows", "--run_validation", "False"]
        given += ["--output_dir", str(tmp_path / "run"), "--batching_strategy", "padding", "--batch_size_training", "1"]
        given += ["--num_workers_dataloader", str(int(num_workers)), *flags]
        how: dict[str, Any] = {"world_size": world_size, "torchrun": torchrun, "log": tmp_path / "log"}
        commands.append(RunningCommand(*given, **how, FINETUNING_GRACE_SCALE=str(grace_scale)))
        return commands[-1]

    yield start
    for running in commands:
        running.kill()


def wait_for_step(run: RunningCommand, folder: Path, step: int) -> None:
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(train_events(folder)) >= step, run)


def wait_for_end(run: RunningCommand, *, limit_seconds: float = HANG_LIMIT_SECONDS) -> tuple[str, list[str]]:
    """The log and its error lines, when all processes have ended, each of them with a failure."""
    processes = run.processes()
    assert all(run.wait(limit_seconds))
    assert_all_gone(processes)
    log = run.log.read_text()
    return log, error_lines(log)


@pytest.mark.slow
def test_torchrun_names_a_rank_that_was_killed_and_the_others_say_nothing(start: Start, tmp_path: Path) -> None:
    run = start("time.sleep(0.1)", torchrun=True)
    wait_for_step(run, tmp_path / "run", 3)
    run.rank(1).send_signal(signal.SIGKILL)
    log, errors = wait_for_end(run)
    assert log.count("Signal 9 (SIGKILL)") == 1
    assert "rank      : 1 (local_rank: 1)" in log.split("Root Cause")[1]
    assert not errors
    assert 'finetuning.py", line' not in log, "a traceback of this project"
    assert not (tmp_path / "run/traces").exists()


def test_a_survivor_says_what_it_does_and_promises_no_checkpoint(start: Start, tmp_path: Path) -> None:
    """torchrun sends it SIGTERM, as for a request to stop. It reads its data then, and waits for no other rank."""
    asleep = tmp_path / "asleep"
    sleep = f"open({str(asleep)!r}, 'w').close() or time.sleep(600)"
    run = start(f"{sleep} if rank == '0' and num_reads == 5 else time.sleep(0.1)", torchrun=True)
    wait_for_step(run, tmp_path / "run", 3)
    wait_until(asleep.exists, run)
    run.rank(1).send_signal(signal.SIGKILL)
    log, errors = wait_for_end(run)
    assert "rank 1 ended: this rank ends, too, without a checkpoint" in log
    assert "with a checkpoint" not in log
    assert not errors
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "grace_scale", "killed_by"), [(0, 0.2, signal.SIGKILL), (1, 0.4, signal.SIGSEGV)])
def test_without_a_launcher_the_survivors_of_a_killed_rank_end_and_name_it(
    start: Start, tmp_path: Path, rank: int, grace_scale: float, killed_by: signal.Signals
) -> None:
    run = start("time.sleep(0.1)", "--enable_fsdp", world_size=3 - rank, torchrun=False, grace_scale=grace_scale)
    wait_for_step(run, tmp_path / "run", 3)
    run.rank(rank).send_signal(killed_by)
    log, (error,) = wait_for_end(run)
    assert error.startswith(f"error: rank {rank} ended in step ")
    crash = log.partition("Fatal Python error: Segmentation fault")[2]
    assert ("in carry_out" in crash) == (killed_by == signal.SIGSEGV), "where the rank was"
    assert "Traceback" not in log
    if rank != 0:
        assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [True, False])
def test_an_error_in_the_data_of_one_rank_is_shown_once_and_ends_all(
    start: Start, tmp_path: Path, torchrun: bool
) -> None:
    run = start("assert rank == '0' or num_reads < 4, 'a planted failure'", torchrun=torchrun)
    log, (error,) = wait_for_end(run, limit_seconds=300)
    assert error == "error: rank 1: AssertionError: a planted failure"
    assert log.count("in plant") == 1, "the traceback, once"
    assert len(train_events(tmp_path / "run")) == 3
    if torchrun:
        assert "rank      : 1 (local_rank: 1)" in log.split("Root Cause")[1]
    else:
        assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"


@pytest.mark.slow
def test_an_error_of_all_ranks_is_shown_once(start: Start, tmp_path: Path) -> None:
    run = start("assert num_reads < 4, 'a planted failure'", torchrun=True)
    log, (error,) = wait_for_end(run, limit_seconds=300)
    assert error == "error: AssertionError: a planted failure"
    assert log.count("in plant") == 1, "the traceback, once"
    assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [True, False])
def test_a_rank_that_sleeps_for_ever_is_named_and_leaves_traces(start: Start, tmp_path: Path, torchrun: bool) -> None:
    """With torchrun in its main process, after a slow first step (code compiles there); without, in its worker."""
    plant = "if rank == '1' and num_reads == 4:\n        sleep_for_ever()"
    if torchrun:
        plant += "\n    if rank == '1' and num_reads == 1:\n        time.sleep(4)"
    run = start(plant, "--step_timeout_seconds", "3", "--enable_fsdp", num_workers=not torchrun, torchrun=torchrun)
    wait_for_step(run, tmp_path / "run", 1)
    log, (error,) = wait_for_end(run)
    traces = tmp_path / "run/traces"
    assert error.startswith("error: rank 1 stopped in step 4 ")
    assert str(traces) in error
    assert 'finetuning.py", line' not in log, "a traceback of this project"
    assert "in sleep_for_ever" in (traces / "stack-rank-1.txt").read_text()
    assert "sleep_for_ever" not in (traces / "stack-rank-0.txt").read_text()
    collectives = json.loads((traces / "gloo-rank-0.json").read_text())["entries"]
    assert collectives[-1]["profiling_name"] == "gloo:all_reduce", "the count of the step that did not come"
    assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"
    if torchrun:
        assert "sleep_for_ever" in error
        assert "rank      : 1 (local_rank: 1)" in log.split("Root Cause")[1]
