"""Requests to stop: all ranks end after the same step, with status 0, and nothing of them stays.

Real processes under the real launcher; `tests/helpers/stoppable.py` is the loop.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.batches.layout import BatchLayout
from data.batches.rows import make_rows
from data.batches.step_loader import StepLoader
from data.batches.workers import STOP_SIGNALS, watch_parent
from data.sequences.causal import build_sequences
from ranks.environment import Environment
from ranks.process_group import start_process_group, stop_process_group
from supervision.stopping import SAME_WISH_SECONDS, StopRequests, _ignore_signals
from tests.helpers.processes import RunningCommand, assert_all_gone, read_metrics, train_events, wait_until

LIMIT_SECONDS = 300
Start = Callable[..., RunningCommand]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the loop and waits until it has made three steps."""
    commands: list[RunningCommand] = []

    def start(*flags: str, world_size: int = 2, torchrun: bool = True, **how: Any) -> RunningCommand:
        given, script = ["--folder", str(tmp_path), *flags], "tests/helpers/stoppable.py"
        common = {"torchrun": torchrun, "log": tmp_path / "log", "script": script, **how}
        commands.append(RunningCommand(*given, world_size=world_size, **common))
        wait_until(lambda: step_of(tmp_path) >= 3, commands[-1])
        return commands[-1]

    yield start
    for running in commands:
        running.kill()


def step_of(folder: Path) -> int:
    """The last step that rank 0 has ended."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "step").read_text())
    return 0


def send_again(run: RunningCommand, number: signal.Signals) -> None:
    """To the process group, once the first signal has been read and is so long ago that this is no echo of it."""
    num_processes = len(run.processes())
    wait_until(lambda: "the run ends after this step" in run.log.read_text(), run)
    time.sleep(SAME_WISH_SECONDS + 2)  # other ranks read it, and say nothing
    assert len(run.processes()) == num_processes
    send(run, number, "group")


def end(run: RunningCommand, folder: Path, *, statuses: set[int]) -> tuple[list[dict[str, Any]], str]:
    """What the ranks wrote, and the log, when all that was started has ended with one of these statuses."""
    ended_with = run.wait(LIMIT_SECONDS)
    assert set(ended_with) == statuses, run.log.read_text()
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    return ranks, run.log.read_text()


def assert_stopped_together(ranks: list[dict[str, Any]], log: str, world_size: int, asked: str | None = None) -> None:
    assert len(ranks) == world_size, log
    assert len({(rank["step"], rank["asked"], rank["cut_short"]) for rank in ranks}) == 1, ranks
    assert 3 <= ranks[0]["step"] < 1000
    assert asked is None or ranks[0]["asked"] == asked
    assert 'Traceback (most recent call last):\n  File "' + str(Path(__file__).parent) not in log
    assert "DataLoader worker" not in log


def send(run: RunningCommand, number: signal.Signals, to: str) -> None:
    """To torchrun alone, to its process group as a terminal's Ctrl-C, or to every process as scancel."""
    launcher = run.started[0].pid
    if to == "launcher":
        os.kill(launcher, number)
    elif to == "group":
        os.killpg(launcher, number)
    else:
        for process in run.processes():
            process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "to"),
    [
        pytest.param(signal.SIGTERM, "launcher", marks=pytest.mark.slow),
        (signal.SIGINT, "everyone"),
        pytest.param(signal.SIGHUP, "launcher", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "group", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "everyone", marks=pytest.mark.slow),
    ],
)
def test_ranks_save_and_end_alike_when_torchrun_is_asked(
    start: Start, tmp_path: Path, number: signal.Signals, to: str
) -> None:
    run = start(real=(number, to) == (signal.SIGTERM, "launcher"))
    processes = run.processes()
    assert len(processes) == 1 + 2 * 3, "torchrun, and per rank two DataLoader workers"
    send(run, number, to)
    ranks, log = end(run, tmp_path, statuses={1})  # torchrun's own, whatever its ranks end with
    assert_stopped_together(ranks, log, 2, f"{number.name} on rank {ranks[0]['asked'][-1]}")
    assert len(re.findall(f"{number.name}( on rank .)?: the run ends after this step", log)) == 1
    assert f"Process {run.started[0].pid} got signal: {int(number)}" in log
    assert "exitcode" not in log, "no rank failed"
    assert "forcefully" not in log
    assert_all_gone(processes)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_rank_stops_all_and_torchrun_ends_with_0(start: Start, tmp_path: Path, rank: int) -> None:
    run = start()
    processes = run.processes()
    run.rank(rank).send_signal(signal.SIGUSR1)
    ranks, log = end(run, tmp_path, statuses={0})
    assert_stopped_together(ranks, log, 2, f"SIGUSR1 on rank {rank}")
    assert_all_gone(processes)


def test_torchrun_forwards_sigusr1_where_it_is_told_to(start: Start, tmp_path: Path) -> None:
    run = start(options=("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"))
    processes = run.processes()
    send(run, signal.SIGUSR1, "launcher")
    ranks, log = end(run, tmp_path, statuses={1})
    assert_stopped_together(ranks, log, 2, f"SIGUSR1 on rank {ranks[0]['asked'][-1]}")
    assert_all_gone(processes)


@pytest.mark.slow
def test_torchrun_dies_of_sigusr1_otherwise_and_its_ranks_go_on_without_it(start: Start, tmp_path: Path) -> None:
    run = start()
    processes = run.processes()
    send(run, signal.SIGUSR1, "launcher")
    run.wait(LIMIT_SECONDS)
    step = step_of(tmp_path)
    deadline = time.monotonic() + LIMIT_SECONDS
    while step_of(tmp_path) < step + 5:  # torchrun is gone: `wait_until` would say so
        assert time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.05)
    (tmp_path / "STOP").touch()
    assert_all_gone(processes)
    ranks, log = end(run, tmp_path, statuses={-signal.SIGUSR1})
    assert_stopped_together(ranks, log, 2, f"the file {tmp_path / 'STOP'}")


@pytest.mark.parametrize("torchrun", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_file_stops_all_ranks_and_is_gone_afterwards(start: Start, tmp_path: Path, torchrun: bool) -> None:
    run = start("--stream", torchrun=torchrun)
    processes = run.processes()
    (tmp_path / "STOP").touch()
    ranks, log = end(run, tmp_path, statuses={0})
    assert_stopped_together(ranks, log, 2, f"the file {tmp_path / 'STOP'}")
    assert not (tmp_path / "STOP").exists()
    assert_all_gone(processes)


def test_a_file_of_an_earlier_run_is_removed_and_said(start: Start, tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    os.utime(tmp_path / "STOP", (time.time() - 60, time.time() - 60))
    run = start("--num_steps", "8", "--step_seconds", "0.3", world_size=1, torchrun=False)
    (rank,), log = end(run, tmp_path, statuses={0})
    assert (rank["step"], rank["asked"]) == (8, "")
    assert f"{tmp_path / 'STOP'} is older than this run: removed" in log


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_without_a_launcher_every_process_that_is_signalled_ends_with_0(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    run = start("--stream", torchrun=False)
    processes = run.processes()
    assert len(processes) == 2 * 2, "a stream has one worker"
    send(run, number, "group")  # the ranks and their DataLoader workers
    ranks, log = end(run, tmp_path, statuses={0})
    assert_stopped_together(ranks, log, 2)
    assert_all_gone(processes)


@pytest.mark.slow
def test_four_ranks_agree(start: Start, tmp_path: Path) -> None:
    run = start(world_size=4, torchrun=False)
    processes = run.processes()
    run.rank(2).send_signal(signal.SIGTERM)
    ranks, log = end(run, tmp_path, statuses={0})
    assert_stopped_together(ranks, log, 4, "SIGTERM on rank 2")
    assert_all_gone(processes)


def test_an_evaluation_is_left_early_on_all_ranks_alike(start: Start, tmp_path: Path) -> None:
    run = start("--eval_at", "4", torchrun=False)
    wait_until((tmp_path / "evaluating").exists, run)
    processes = run.processes()
    run.rank(1).send_signal(signal.SIGTERM)
    ranks, log = end(run, tmp_path, statuses={0})
    assert_stopped_together(ranks, log, 2, "SIGTERM on rank 1")
    assert (ranks[0]["step"], ranks[0]["cut_short"]) == (4, True)
    assert_all_gone(processes)


@pytest.mark.slow
def test_a_second_signal_ends_a_run_that_cannot_stop(start: Start, tmp_path: Path) -> None:
    """Rank 1 never comes to the agreement, so rank 0's main thread waits inside a collective, where no handler runs."""
    run = start("--stuck_at", "4", torchrun=False)
    processes = run.processes()
    send(run, signal.SIGUSR1, "group")
    send_again(run, signal.SIGINT)
    ranks, log = end(run, tmp_path, statuses={128 + signal.SIGINT})
    assert not ranks
    assert log.count("SIGINT again: this ends at once") == 1
    assert_all_gone(processes)


@pytest.mark.slow
def test_a_second_ctrl_c_goes_through_torchrun(start: Start, tmp_path: Path) -> None:
    run = start("--stuck_at", "4")
    processes = run.processes()
    send(run, signal.SIGINT, "group")
    send_again(run, signal.SIGINT)
    ranks, log = end(run, tmp_path, statuses={1})
    assert not ranks, log
    assert_all_gone(processes)


@pytest.mark.parametrize("stream", [False, True])
def test_no_worker_outlives_a_main_process_that_was_killed(start: Start, tmp_path: Path, stream: bool) -> None:
    """Though what it sent fills the pipe, and nobody reads."""
    run = start(*(["--stream"] if stream else []), world_size=1, torchrun=False)
    processes = run.processes()
    assert len(processes) == (2 if stream else 3)
    run.rank(0).kill()
    assert_all_gone(processes)


def watch_late(started_by: int, pid_file: str) -> None:
    """A worker that comes to itself when the process that started it is gone already."""
    Path(pid_file).write_text(str(os.getpid()))
    while os.getppid() == started_by:
        time.sleep(0.01)
    watch_parent(0)
    time.sleep(100)


def start_and_die(pid_file: str) -> None:
    multiprocessing.get_context("fork").Process(target=watch_late, args=(os.getpid(), pid_file)).start()
    while not (os.path.exists(pid_file) and Path(pid_file).read_text()):
        time.sleep(0.01)
    os._exit(0)


def test_no_worker_outlives_a_main_process_that_was_killed_before_the_worker_looked(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    main_process = multiprocessing.get_context("fork").Process(target=start_and_die, args=(str(pid_file),))
    main_process.start()
    main_process.join()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert_all_gone([psutil.Process(int(pid_file.read_text()))])


@pytest.fixture
def group_of_one() -> Iterator[None]:
    start_process_group(ALONE)
    yield
    stop_process_group()


ALONE = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, launched=False)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("ended_well", [False, True])
def test_signals_do_what_they_did_before_when_the_loop_has_ended(tmp_path: Path, ended_well: bool) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in STOP_SIGNALS]

    before, fd = handlers(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    with StopRequests(ALONE, tmp_path, ends_process=False) as stopping:
        assert handlers() != before
        assert stopping.agree(False, True) == (False, (False, True))
        if ended_well:  # a notebook goes on after main()
            stopping.run_has_ended()
    assert handlers() == before
    assert signal.set_wakeup_fd(fd) == fd
    assert stopping.asked == ""


@pytest.mark.usefixtures("group_of_one")
def test_a_signal_changes_nothing_when_the_run_has_ended_well(tmp_path: Path) -> None:
    before, fd = {number: signal.getsignal(number) for number in STOP_SIGNALS}, signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    try:
        with StopRequests(ALONE, tmp_path, ends_process=True) as stopping:
            stopping.run_has_ended()
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)  # would end this process
        time.sleep(0.2)
        assert stopping.asked == ""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(fd)
        atexit.unregister(_ignore_signals)


@pytest.mark.usefixtures("group_of_one")
def test_a_hangup_stops_a_run_unless_nohup_had_it_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests(ALONE, tmp_path, ends_process=True) as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert not stopping.agree().stop
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("group_of_one")
def test_off_the_main_thread_the_file_stops_a_run(tmp_path: Path) -> None:
    found = []

    def loop() -> None:
        with StopRequests(ALONE, tmp_path, ends_process=True) as stopping:
            found.append(stopping.agree().stop)
            (tmp_path / "STOP").touch()
            stopping._next_look = 0.0
            items = stopping.until_asked(iter("abc"))
            found.extend([list(items), items.cut_short, stopping.asked])

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert found == [False, [], True, f"the file {tmp_path / 'STOP'}"]
    assert not (tmp_path / "STOP").exists()


@pytest.mark.usefixtures("group_of_one")
def test_items_that_nobody_stops_are_all_there(tmp_path: Path) -> None:
    with StopRequests(ALONE, tmp_path, ends_process=True) as stopping:
        items = stopping.until_asked(iter("abc"))
        assert (list(items), items.cut_short) == (["a", "b", "c"], False)


def stuck_after_first(rows: list[Any]) -> int:
    """Collates row 0, and never returns from another."""
    if rows[0][0][2]:
        threading.Event().wait()
    return 0


@pytest.mark.slow
def test_a_worker_that_reads_for_ever_ends_with_its_loader() -> None:
    documents = [{"input_ids": [5, 6], "labels": [5, 6]}] * 4
    examples = build_sequences(documents, name="test", context_length=8)
    rows = make_rows(examples, batching_strategy="padding", context_length=8)
    loader = StepLoader(rows, BatchLayout(1, 1, 1), rank=0, seed=None, collate=stuck_after_first, num_workers=1)
    others = psutil.Process().children()  # of other tests
    batches = loader.epoch(0)
    next(batches)
    (worker,) = set(psutil.Process().children()) - set(others)
    worker.send_signal(signal.SIGINT)
    time.sleep(0.5)  # a worker that it ends is gone by then
    assert worker.is_running()
    del batches, loader
    gc.collect()
    assert_all_gone([worker])


RECIPE = """
import random

def get_rows(dataset_config, tokenizer, split):
    draw = random.Random(split)
    rows = [[draw.randrange(5, 500) for _ in range(draw.randrange(5, 50))] for _ in range(300)]
    return [{"input_ids": row, "labels": row} for row in rows]
"""


@pytest.mark.full
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tiny_model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    words = f"--model_name {tiny_model} --dataset {recipe}:get_rows --enable_fsdp --batching_strategy padding"
    words += " --batch_size_training 1 --num_epochs 1 --run_validation False --resume auto --lr 1e-2"
    common = words.split()

    def run(name: str) -> RunningCommand:
        given = [*common, "--output_dir", str(tmp_path / name)]
        return RunningCommand(*given, world_size=2, torchrun=True, log=tmp_path / f"{name}.log")

    assert run("whole").wait(300) == [0], (tmp_path / "whole.log").read_text()
    stopped = run("stopped")
    metrics = tmp_path / "stopped/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(train_events(tmp_path / "stopped")) >= 3, stopped)
    processes = stopped.processes()
    send(stopped, signal.SIGINT, "everyone")
    assert stopped.wait(LIMIT_SECONDS) == [1]
    assert_all_gone(processes)
    end_event = read_metrics(tmp_path / "stopped")[-1]
    assert (end_event["event"], end_event["status"]) == ("end", "stopped")
    assert 3 <= end_event["step"] < 150
    assert (tmp_path / f"stopped/checkpoints/step-{end_event['step']:08d}/COMPLETE").exists()
    assert run("stopped").wait(300) == [0], (tmp_path / "stopped.log").read_text()
    losses = [
        [(event["step"], event["loss"]) for event in train_events(tmp_path / name)] for name in ("whole", "stopped")
    ]
    assert losses[0] == losses[1]
