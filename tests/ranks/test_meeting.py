"""Ranks that no launcher watches: variables that contradict each other are refused, and who ends early is noticed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import ranks.job_store
from ranks.environment import Environment, read_environment
from ranks.job_store import connect, new_client
from tests.helpers.made import Made
from tests.helpers.processes import ROOT, Captured, process_variables, ranks_of, read_metrics
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import flags_of
from utils.errors import ConfigError, TrainingError

RECIPE = """
import os, signal, time, torch
from tests.helpers.random_documents import get_custom_dataset
from utils.errors import ConfigError

def get_rows(dataset_config, tokenizer, split):
    {plant}
    return get_custom_dataset(dataset_config, tokenizer, split)
"""
GIVEN = ["--run_validation", "False", "--max_train_step", "2", "--save_every_steps", "0", "--save_model", "False"]
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": "abc"}, "RANK=abc: must be a whole number from 0 to WORLD_SIZE - 1 = 1"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "2"}, "RANK=2"),
        ({"RANK": "9" * 5000}, "RANK=999"),
        ({"RANK": "²"}, "RANK=²"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a whole number from 1"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0"),
        ({"WORLD_SIZE": None}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": None}, "WORLD_SIZE is set and RANK is not"),
        ({"MASTER_ADDR": None}, "RANK is set and MASTER_ADDR is not"),
        ({"MASTER_PORT": ""}, "RANK is set and MASTER_PORT is not"),
        ({"MASTER_PORT": "ssh"}, "MASTER_PORT=ssh: must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: must be a whole number from 1 to WORLD_SIZE = 2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x"),
        ({"TORCHELASTIC_RESTART_COUNT": "many"}, "TORCHELASTIC_RESTART_COUNT=many"),
        ({"SLURM_RESTART_COUNT": "-"}, "SLURM_RESTART_COUNT=-"),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "RANK": None, "WORLD_SIZE": None},
            "SLURM_STEP_NUM_TASKS=8 and RANK is not set: each of srun's tasks would train alone",
        ),
        ({"FINETUNING_GRACE_SCALE": "nan"}, "FINETUNING_GRACE_SCALE=nan"),
    ],
)
def test_variables_that_cannot_be_are_refused(
    changed: dict[str, str | None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (LAUNCHED | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        read_environment()
    assert str(refused.value).startswith(named)
    assert len(str(refused.value)) < 300


Start = Callable[..., Captured]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a process with these variables, and what is planted in its dataset function."""
    started: list[Captured] = []

    def write(plant: str) -> Path:
        recipe = tmp_path / f"recipe-{len(recipes)}.py"
        recipe.write_text(RECIPE.format(plant=plant))
        return recipe

    recipes = Made(write)

    def start(
        variables: dict[str, str], plant: str = "pass", *, grace_scale: float = 0.02, run: Path = tmp_path / "run"
    ) -> Captured:
        words = flags_of(tiny_model, run, *GIVEN, "--dataset", f"{recipes[plant]}:get_rows")
        environment = process_variables(variables | {"FINETUNING_GRACE_SCALE": str(grace_scale)})
        started.append(Captured([str(ROOT / "finetuning.py"), *words], tmp_path, environment))
        return started[-1]

    yield start
    for process in started:
        if process.fork.returncode is None:
            process.kill()


# Ranks that wait for each other take seconds and hardly a core: the runs of a test wait at the same time.


def test_a_rank_that_contradicts_rank_0_is_refused_and_rank_0_does_not_wait(start: Start, tmp_path: Path) -> None:
    contradictions = [
        ({"RANK": "abc"}, "RANK=abc"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3: rank 0 has WORLD_SIZE=2"),
        ({"MASTER_ADDR": "no.such.machine.invalid"}, "MASTER_ADDR=no.such.machine.invalid: no machine has this name"),
    ]
    runs = []
    for number, (changed, _) in enumerate(contradictions):
        (first, second), run = ranks_of(2), tmp_path / f"run-{number}"
        # rank 0 gives up after six seconds; the other begins first, and looks for it until it is told what is wrong
        other = start(second | changed, grace_scale=0.2, run=run)
        runs.append([start(first, grace_scale=0.01, run=run), other])
    for number, (_, named) in enumerate(contradictions):
        outcomes = [process.outcome(300) for process in runs[number]]
        assert [outcome.status for outcome in outcomes] == [1, 2], outcomes
        (error,) = error_lines(outcomes[1].stderr)
        assert named in error
        (error,) = error_lines(outcomes[0].stderr)
        assert error.startswith("error: rank 1 did not start (no sign of it for ")
        assert "Traceback" not in outcomes[0].stderr + outcomes[1].stderr
        assert not (tmp_path / f"run-{number}").exists()


def test_a_rank_that_is_refused_alone_refuses_all(start: Start, tmp_path: Path) -> None:
    runs = []
    for refused in (0, 1):
        plant = f'if os.environ["RANK"] == "{refused}": raise ConfigError("--its_path: is not on this disk")'
        run = tmp_path / f"run-{refused}"
        runs.append([start(variables, plant, grace_scale=0.2, run=run) for variables in ranks_of(2)])
    for refused, processes in enumerate(runs):
        outcomes = [process.outcome(300) for process in processes]
        assert [outcome.status for outcome in outcomes] == [2, 2], outcomes
        (error,) = error_lines(outcomes[1 - refused].stderr)
        assert re.search(rf"refused on rank {refused} \(\S+\): --its_path: is not on this disk$", error)
        assert not (tmp_path / f"run-{refused}").exists()


def test_a_rank_0_that_ends_while_others_connect_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in (LAUNCHED | {"MASTER_PORT": str(store.port), "FINETUNING_GRACE_SCALE": "1"}).items():
        monkeypatch.setenv(name, value)
    is_connected, take_rank = threading.Event(), ranks.job_store._take_rank
    monkeypatch.setattr(ranks.job_store, "_take_rank", lambda *given: is_connected.set() or take_rank(*given))
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(connect, read_environment())
        assert is_connected.wait(60), "it waits for an answer next"
        del store
        with pytest.raises(TrainingError, match="rank 0 ended before the ranks had connected"):
            connecting.result(timeout=60)


def test_of_two_processes_with_one_rank_the_second_is_refused(start: Start, tmp_path: Path) -> None:
    first, second, *_ = ranks_of(4)
    processes = [start(variables, grace_scale=1.0) for variables in (first, second)]
    place = (first["MASTER_ADDR"], int(first["MASTER_PORT"]))
    looking = Environment(
        rank=3, local_rank=3, world_size=4, local_world_size=4, launched=True, meeting_place=place, grace_scale=0.2
    )
    new_client(looking).wait(["taken/0", "taken/1"], timedelta(seconds=120))
    for variables, named in ((first, f"MASTER_PORT={first['MASTER_PORT']}: is in use"), (second, "RANK=1: another ")):
        outcome = start(variables).outcome(300)
        assert outcome.status == 2, outcome
        (error,) = error_lines(outcome.stderr)
        assert named in error
        assert "Traceback" not in outcome.stderr
    assert [process.fork.poll() for process in processes] == [None, None], "they wait for the others"


def test_a_rank_that_is_killed_before_it_trains_is_noticed(start: Start, tmp_path: Path) -> None:
    at_once = "(time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL))"
    connecting = f"setattr(torch.distributed, 'init_process_group', lambda *_, **__: {at_once})"
    runs = []
    for killed, where in ((0, at_once), (1, at_once), (1, connecting)):  # while it reads data, or connects
        plant, run = f"os.environ['RANK'] == '{killed}' and {where}", tmp_path / f"run-{len(runs)}"
        runs.append((killed, [start(variables, plant, run=run) for variables in ranks_of(2)]))
    for killed, processes in runs:
        outcomes = [process.outcome(300) for process in processes]
        assert outcomes[killed].status == -signal.SIGKILL
        assert outcomes[1 - killed].status == 1
        (error,) = error_lines(outcomes[1 - killed].stderr)
        assert f"rank {killed} ended before the ranks had connected; its own output says why" in error


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [8, pytest.param(16, marks=pytest.mark.full)])
def test_signals_at_any_time_leave_no_rank_waiting(num_runs: int, start: Start, tmp_path: Path) -> None:
    """Before the ranks meet, while they load, in a step, after the last one: a bounded time, and true statuses."""
    draw = random.Random(16)
    for first in range(0, num_runs, 4):  # four runs at a time: ranks whose others have ended wait, mostly
        folders = [tmp_path / f"run-{first + index}" for index in range(4)]
        runs = [[start(variables, run=folder) for variables in ranks_of(2)] for folder in folders]
        numbers = [draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]) for _ in runs]
        to = [draw.choice([(0,), (1,), (0, 1)]) for _ in runs]
        seconds = [draw.uniform(0.1, 5.0) for _ in runs]
        with ThreadPoolExecutor(len(runs)) as threads:
            list(threads.map(end_by_signal, folders, runs, numbers, to, seconds))


def end_by_signal(run: Path, ranks: list[Captured], number: signal.Signals, to: tuple[int, ...], after: float) -> None:
    """Send ranks a signal after so many seconds. No rank waits, and each says the truth of how the run ended."""
    time.sleep(after)
    for rank in to:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(ranks[rank].fork.pid, number)
    outcomes = [rank.outcome(120) for rank in ranks]
    statuses = [outcome.status for outcome in outcomes]
    told = f"{number.name} to {to} after {after:.2f} s: {outcomes}"
    assert "in main" not in "".join(outcome.stderr for outcome in outcomes), f"a traceback; {told}"
    ends = (
        [event["status"] for event in read_metrics(run) if event["event"] == "end"]
        if (run / "metrics.jsonl").exists()
        else []
    )
    if 0 in statuses:
        assert statuses == [0, 0], told
        assert ends in (["finished"], ["stopped"]), told
    else:
        assert all(statuses[rank] in ((-number, 1, 2) if rank in to else (1, 2)) for rank in (0, 1)), told
        assert ends in ([], ["failed"]), told
