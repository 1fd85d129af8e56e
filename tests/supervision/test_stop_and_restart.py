"""Real runs under torchrun that are asked to stop, or killed and started again: they end as if left alone.

Compared are every step's loss, gradient norm, learning rate and tokens, the evaluations, and the weights, bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ranks.environment import Environment
from ranks.meeting import meet
from run_folder.checkpoint_folder import checkpoints, damage
from tests.helpers.processes import (
    ProcessGroup,
    RunningCommand,
    assert_all_gone,
    read_metrics,
    train_events,
    wait_until,
)
from tests.helpers.resuming import SHARDED, assert_bit_equal, flags_of

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 300  # imports and loading, mostly
NUM_STEPS = 45
EVERY = 15  # steps from checkpoint to checkpoint
RECIPE = """
import time
from pathlib import Path
from data.batches.rows import Rows
from tests.helpers.random_documents import get_custom_dataset

def read_slowly(rows, index, read=Rows.__getitem__):
    if Path({slow!r}).exists():
        time.sleep(0.05)
    return read(rows, index)

Rows.__getitem__ = read_slowly

def get_rows(dataset_config, tokenizer, split):
    return get_custom_dataset(dataset_config, tokenizer, split) * (1 if split == "train" else 12)
"""

Launch = Callable[..., RunningCommand]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts torchrun on finetuning.py, or on a script around it."""
    commands: list[RunningCommand] = []

    def launch(*flags: str, world_size: int = 2, **given: Any) -> RunningCommand:
        log = tmp_path / f"log-{len(commands)}"
        commands.append(RunningCommand(*flags, world_size=world_size, torchrun=True, log=log, **given))
        return commands[-1]

    yield launch
    for running in commands:
        running.kill()


def many_steps(model: Path, output: Path, *flags: str) -> list[str]:
    """Packed rows over many epochs, every step in the log, workers for the data."""
    defaults = {
        "--batching_strategy": "packing",
        "--num_workers_dataloader": "1",
        "--log_every_steps": "1",
        "--num_epochs": "50",
        "--max_train_step": str(NUM_STEPS),
        "--save_every_steps": "0",
    }
    given = (word for flag, value in defaults.items() if flag not in flags for word in (flag, value))
    return flags_of(model, output, *SHARDED, *given, *flags)


def num_trained(run: Path) -> int:
    """The steps that metrics.jsonl tells of; its last line may not be whole yet."""
    path = run / "metrics.jsonl"
    return len(re.findall(r'^\{"event": "train".*\}$', path.read_text(), re.MULTILINE)) if path.exists() else 0


def logged_steps(log: str) -> list[int]:
    """Every step that was trained, in the log's order."""
    return [int(step) for step in re.findall(r"step (\d+)/\d+ \|", log)]


def is_evaluating(run: Path) -> bool:
    """Whether every tenth step, which one has just been, has no evaluation yet."""
    step = num_trained(run)
    return (
        step > 0 and step % 10 == 0 and f'{{"event": "eval", "step": {step},' not in (run / "metrics.jsonl").read_text()
    )


def evaluations(run: Path) -> list[tuple[Any, ...]]:
    return [(e["step"], e["epoch"], e["loss"]) for e in read_metrics(run) if e["event"] == "eval"]


def assert_stopped(run: Path, log: str, asked: str) -> dict[str, Any]:
    """The run says that it was stopped, and lies on the disk as it was then; what it is to go on from.

    Args:
        asked: a regular expression for what asked for the stop.
    """
    step = logged_steps(log)[-1]
    end_event = read_metrics(run)[-1]
    assert (end_event["event"], end_event["status"], end_event["step"]) == ("end", "stopped", step), log
    assert re.search(f"stopped by {asked} after step {step} of", log), log
    newest = checkpoints(run / "checkpoints")[0]
    assert newest.name == f"step-{step:08d}" == (run / "checkpoints/latest").read_text().strip()
    assert damage(newest) == ""
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())["state"]
    assert state["step"] == step
    return state


def assert_finished(run: RunningCommand) -> str:
    """The log of a run that ends with status 0, and leaves no process."""
    processes = run.processes()
    assert run.wait(LIMIT_SECONDS) == [0], run.log.read_text()
    assert_all_gone(processes)
    return run.log.read_text()


def test_torchrun_is_asked_to_stop_four_ranks_and_the_resumed_run_is_the_one_left_alone(
    launch: Launch, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = ["--run_validation", "False", "--max_train_step", "45"]
    flags = many_steps(tiny_model, tmp_path / "run", *given, "--resume", "auto")
    wrapped = {"world_size": 4, "script": "tests/helpers/rank_status.py"}
    run = launch(str(tmp_path), *flags, **wrapped)
    wait_until(lambda: num_trained(tmp_path / "run") >= 25, run)  # epochs have 21 steps
    processes = run.processes()
    os.kill(run.started[0].pid, signal.SIGTERM)
    assert run.wait(LIMIT_SECONDS) == [1], "torchrun's own, whatever its ranks end with"
    log = run.log.read_text()
    assert_all_gone(processes)
    assert [(tmp_path / f"status-{rank}").read_text() for rank in range(4)] == ["0"] * 4, log
    assert "exitcode" not in log, "no rank failed"
    state = assert_stopped(tmp_path / "run", log, r"SIGTERM on rank \d")  # the first that has seen it
    assert state["step_of_epoch"] > 0
    assert 25 <= state["step"] < 45
    after_signal = re.split(r"SIGTERM on rank \d: the run ends after this step", log)[1]
    assert len(logged_steps(after_signal)) <= 2, "the step in progress, and the one that is read while it is computed"

    log = assert_finished(launch(str(tmp_path), *flags, **wrapped))
    assert f"after step {state['step']}" in log
    assert logged_steps(log) == list(range(state["step"] + 1, 46)), "no step twice"
    process_group.train(many_steps(tiny_model, tmp_path / "whole", *given), 4)
    assert_bit_equal(tmp_path / "run", tmp_path / "whole")


def test_the_file_and_a_signal_to_one_rank_in_an_evaluation_leave_no_trace_in_the_results(
    launch: Launch, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.py"
    slow = tmp_path / "slow"  # as long as it is there, an evaluation takes seconds
    recipe.write_text(RECIPE.format(slow=str(slow)))
    given = ["--dataset", f"{recipe}:get_rows", "--val_batch_size", "1", "--eval_every_steps", "10"]
    given += ["--max_train_step", "40", "--resume", "auto"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    flags = many_steps(tiny_model, run, *given)

    stopped = launch(*flags)
    wait_until(lambda: num_trained(run) >= 5, stopped)
    (run / "STOP").touch()
    first = assert_stopped(run, assert_finished(stopped), re.escape(f"the file {run / 'STOP'}"))
    assert not (run / "STOP").exists()

    stopped = launch(*flags)
    wait_until(lambda: num_trained(run) > first["step"], stopped)
    rank = stopped.rank(1)
    slow.touch()
    wait_until(lambda: is_evaluating(run), stopped)
    rank.send_signal(signal.SIGUSR1)
    slow.unlink()
    second = assert_stopped(run, assert_finished(stopped), "SIGUSR1 on rank 1")
    assert second["eval_due"], "it was left early, and is done again"
    assert second["step"] > first["step"]

    assert_finished(launch(*flags))
    process_group.train(many_steps(tiny_model, whole, *given), 2)
    assert_bit_equal(run, whole)
    assert evaluations(run) == evaluations(whole)
    steps = [step for step, *_ in evaluations(run)]
    assert set(range(10, 41, 10)) <= set(steps)
    assert len(steps) == len(set(steps))


@pytest.fixture(scope="module")
def left_alone(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that is neither stopped nor killed."""
    folder = tmp_path_factory.mktemp("left_alone") / "run"
    process_group.train(many_steps(tiny_model, folder, "--run_validation", "False"), 2)
    return folder


@pytest.mark.parametrize("folder_is_given", [True, False])
def test_torchrun_restarts_a_run_whose_ranks_are_killed_and_it_finds_its_own_checkpoints(
    folder_is_given: bool, launch: Launch, left_alone: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Once before any checkpoint, and once after some; with --overwrite, which the restarted job must not do."""
    given = ["--run_validation", "False", "--save_every_steps", str(EVERY), "--keep_last", "9"]
    folder = tmp_path / "run"
    flags = many_steps(tiny_model, folder, *given)
    if folder_is_given:
        flags.append("--overwrite")
    else:
        at = flags.index("--output_dir")
        del flags[at : at + 2]
    job = launch(*flags, options=("--max-restarts", "2"), cwd=tmp_path)

    def run() -> Path:
        """The only one; it has a name of its own where none was given."""
        found = [folder] if folder_is_given else list((tmp_path / "outputs").glob("*"))
        assert len(found) <= 1, found
        return found[0] if found else folder

    def newest() -> int:
        return max(
            (int(path.parent.name.split("-")[1]) for path in run().glob("checkpoints/step-????????/COMPLETE")),
            default=0,
        )

    wait_until(lambda: num_trained(run()) >= 2, job)
    before = job.processes()
    assert newest() == 0
    job.rank(1).kill()
    wait_until(lambda: newest() >= 2 * EVERY, job)
    before += job.processes()
    job.rank(0).kill()
    log = assert_finished(job)
    assert_all_gone(before)

    assert log.count("since the launcher has restarted this job") == 2
    trained = logged_steps(log)
    assert set(trained) == set(range(1, NUM_STEPS + 1))
    assert len(trained) - NUM_STEPS <= 2 * EVERY, "what two kills have cost"
    assert [event["step"] for event in train_events(run())] == list(range(1, NUM_STEPS + 1))
    assert read_metrics(run())[-1]["status"] == "finished"
    assert_bit_equal(run(), left_alone)


def test_ranks_that_come_before_rank_0_do_not_meet_what_an_earlier_attempt_left_in_the_launchers_store() -> None:
    """torchrun's store outlives its restarts, and with it the addresses of the ranks that are gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=60)

    def join(rank: int) -> dist.Store:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)
        env = Environment(rank=rank, local_rank=rank, world_size=3, local_world_size=3, launched=True)
        return meet(client, env, limit).entries

    with ThreadPoolExecutor(3) as threads:
        for attempt in range(3):
            names = [f"{server.get('attempt').decode()}/{rank}" for rank in (1, 2)] if attempt else []
            before = [server.get(name) for name in names]
            joining = [threads.submit(join, 1), threads.submit(join, 2)]
            deadline = time.monotonic() + 60
            while any(server.get(name) == asked for name, asked in zip(names, before, strict=True)):
                assert time.monotonic() < deadline, "they ask the attempt before"
                time.sleep(0.01)
            stores = [threads.submit(join, 0).result(), *(future.result() for future in joining)]
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", str(attempt))
            assert [store.get("address") for store in stores] == [str(attempt).encode()] * 3
