"""A rank that the kernel killed for want of host memory: who is left says so, with the figures; or the next session."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import utils.host_memory
from tests.helpers import fake_host, random_documents
from tests.helpers.fake_host import GIB, asking_for_too_much, make_host, on_fake_host
from tests.helpers.processes import SHORT_GRACE, ProcessGroup, RunningCommand, assert_all_gone, log_lines, read_metrics
from tests.helpers.refusals import error_lines
from utils.host_memory import free_host_bytes, host_bytes, killed_since, read_host_memory


def flags(model: Path, output: Path, *given: str) -> list[str]:
    argv = ["--model_name", str(model), "--output_dir", str(output), "--num_workers_dataloader", "0"]
    argv += ["--dataset", f"{random_documents.__file__}:get_custom_dataset", "--run_validation", "False"]
    return [*argv, "--max_train_step", "5", "--save_model", "False", "--context_length", "64", *given]


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_the_container_and_its_kills_are_read(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils.host_memory, "ROOT", make_host(tmp_path, version=version))
    before = read_host_memory()
    assert (before.total, before.available, before.limit) == (8 * GIB, 3 * GIB, 2 * GIB)
    assert (before.num_kills, before.kills_of) == (0, "container")
    free = free_host_bytes()
    assert (host_bytes(), free) == (2 * GIB, {1: GIB, 2: 2**20}[version]), "not the machine's"
    make_host(tmp_path, version=version, cached=GIB // 2)
    assert free_host_bytes() == free + GIB // 2, "the kernel drops files that it has cached"
    assert killed_since(before) == ""
    make_host(tmp_path, version=version, kills=2)
    killed = killed_since(before)
    assert killed.startswith("host memory ran out: the kernel has killed 2 processes of this container since")
    assert "the container may take 2.00 GiB" in killed
    assert "the machine has 8.00 GiB, 3.00 GiB of them available" in killed


def test_without_a_limit_the_machines_own_count_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils.host_memory, "ROOT", make_host(tmp_path, version=0))
    before = read_host_memory()
    assert (before.limit, before.num_kills, before.kills_of) == (None, 40, "machine")
    make_host(tmp_path, version=0, kills=1)
    assert "killed 1 process of this machine" in killed_since(before)
    make_host(tmp_path, version=1, limit_gib=2.0**33)
    assert read_host_memory().limit is None, "cgroup v1 writes a huge number"
    monkeypatch.setattr(utils.host_memory, "ROOT", tmp_path / "not Linux")
    assert str(read_host_memory()) == killed_since(before) == ""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_survivor_names_the_rank_and_the_figures(
    killed: int, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    root = make_host(tmp_path / "host")
    outcomes = process_group.run(
        on_fake_host(flags(tiny_model, tmp_path / "run"), root, killed_rank=killed), 2, timeout_seconds=60
    )
    assert outcomes[killed].status == -signal.SIGKILL
    assert outcomes[1 - killed].status == 1
    (line,) = error_lines(outcomes[1 - killed].stderr)
    assert line.startswith(
        f"error: rank {killed} ended in step 3: host memory ran out: the kernel has killed 1 process"
    )
    assert "the container may take 2.00 GiB, 2.00 GiB of them in use" in line
    assert "Traceback" not in outcomes[1 - killed].stderr
    if killed == 1:
        assert "; last seen holding: rank 1 0." in line
        assert read_metrics(tmp_path / "run")[-1]["status"] == "failed"


@pytest.mark.slow
def test_under_torchrun_it_is_said_before_torchrun_ends_the_others(tiny_model: Path, tmp_path: Path) -> None:
    root = make_host(tmp_path / "host")
    argv = [str(root), "1", "3", *flags(tiny_model, tmp_path / "run")]
    run = RunningCommand(
        *argv, world_size=2, torchrun=True, log=tmp_path / "log", script=fake_host.__file__, **SHORT_GRACE
    )
    try:
        processes = run.processes()
        assert run.wait(300) == [1]
    finally:
        run.kill()
    assert_all_gone(processes)
    log = run.log.read_text()
    assert "Signal 9 (SIGKILL)" in log
    (line,) = error_lines(log)
    assert line.startswith("error: rank 1 ended in step 3: host memory ran out: the kernel has killed 1 process")


@pytest.mark.parametrize("by_the_kernel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_single_process_cannot_speak_but_the_next_session_can(
    by_the_kernel: bool, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    root = make_host(tmp_path / "host")
    argv = flags(tiny_model, tmp_path / "run", "--save_every_steps", "1", "--resume", "auto")
    (outcome,) = process_group.run(on_fake_host(argv, root, killed_rank=0), 1)
    assert outcome.status == -signal.SIGKILL
    if not by_the_kernel:
        make_host(root)
    (outcome,) = process_group.train(on_fake_host(argv, root), 1)
    (line,) = [line for line in log_lines(outcome.stdout) if "the session before" in line]
    assert line.startswith("resume: the session before ended without a word after step 2")
    assert ("host memory ran out: the kernel has killed 1 process of this container" in line) == by_the_kernel
    assert ("as if it was killed (exit status -9 or 137)" in line) != by_the_kernel
    assert "host memory of its ranks when it was last measured: rank 0 0." in line
    (outcome,) = process_group.train(on_fake_host([*argv, "--num_epochs", "4"], root), 1)
    assert "the session before" not in outcome.stdout


def test_an_allocation_that_fails_on_the_host_has_its_own_account(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    argv = flags(tiny_model, tmp_path / "run")
    argv[argv.index("--num_workers_dataloader") + 1] = "2"
    (outcome,) = process_group.run(asking_for_too_much(argv), 1)
    assert outcome.status == 1
    (line,) = error_lines(outcome.stderr)
    assert line.startswith("error: out of host memory: rank 0 of 1 on ")
    assert "DefaultCPUAllocator: can't allocate memory" in line
    account = json.loads((tmp_path / "run/oom.json").read_text())
    assert (account["whose"], account["step"], account["allocated_gib"]) == ("host", 1, None)
    assert 0 < account["host_memory"]["resident"] < account["host_memory"]["total"]
    assert account["changes"]
    assert all(change["saves_gib"] > 0 for change in account["changes"]), "each is planned"
