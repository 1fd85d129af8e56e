"""A run folder in use is refused to a second run; one whose owner has died is not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import run_folder.default_folders
from run_folder.checkpoint_folder import checkpoints, damage
from run_folder.default_folders import default_folders, default_name, make_default_folder
from run_folder.kernel_lock import is_locked, is_on_local_disk
from run_folder.lock import BEAT_SECONDS, STALE_SECONDS, RunLock, find_dead, holder_of
from run_folder.run_yaml import read_run_yaml
from tests.helpers.processes import (
    ROOT,
    SHORT_GRACE,
    RunningCommand,
    read_metrics,
    run_command,
    train_events,
    wait_until,
)
from tests.helpers.refusals import Bench
from utils.errors import ConfigError
from utils.processes import started_at
from utils.wording import plural

Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process that tries to hold folders."""
    started: list[subprocess.Popen[str]] = []

    def hold(*folders: Path, worker: bool = False) -> subprocess.Popen[str]:
        argv = [sys.executable, str(ROOT / "tests/helpers/lock_holder.py"), *["--worker"][:worker], *map(str, folders)]
        group = {"start_new_session": True}  # of the process and its fork, which would keep the pipe open
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **group))
        return started[-1]

    yield hold
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def has_ended_by_sigint(pid: int) -> bool:
    """Interrupt a process that its parent does not wait for; whether it has ended."""
    if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
        return True
    os.kill(pid, signal.SIGINT)
    return False


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def owner(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "lock.json").read_text())


def write_lock(folder: Path, **changed: Any) -> None:
    """Leave the lock of this very process there, but for what is changed."""
    (folder / "lock.json").unlink(missing_ok=True)
    lock = RunLock()
    lock.take("--output_dir", folder)
    values = owner(folder) | changed
    lock.release()
    folder.mkdir(exist_ok=True)
    (folder / "lock.json").write_text(json.dumps(values))


def test_a_live_process_is_named_and_a_dead_one_is_not_in_the_way(hold: Hold, tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    assert said(first) == "held"
    since = owner(tmp_path / "run")["since"]
    by = f"a run on {socket.gethostname()} (process {first.pid}, since {since})"
    with pytest.raises(ConfigError) as refused:
        RunLock().take("--output_dir", tmp_path / "run")
    assert str(refused.value) == (
        f"--output_dir: {tmp_path / 'run'} is in use by {by}; stop that run, or give another folder"
    )
    assert said(hold(tmp_path / "run")) == str(refused.value)
    assert owner(tmp_path / "run")["process"] == first.pid, "whoever was refused left it alone"
    first.kill()
    first.wait()
    started = time.monotonic()
    second = hold(tmp_path / "run")
    assert said(second) == "held"
    assert owner(tmp_path / "run")["process"] == second.pid
    assert time.monotonic() - started < 30, "a process of this machine is looked at, not waited for"


def test_an_end_gives_the_folder_back_and_removes_it_if_nothing_was_written(tmp_path: Path) -> None:
    with RunLock() as lock:
        lock.take("--output_dir", tmp_path / "empty")
        lock.take("--output_dir", tmp_path / "full")
        (tmp_path / "full/run.yaml").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["full", "full/run.yaml"]


def test_a_second_folder_that_is_in_use_gives_the_first_one_back(hold: Hold, tmp_path: Path) -> None:
    assert said(hold(tmp_path / "checkpoints")) == "held"
    assert "is in use by" in said(hold(tmp_path / "run", tmp_path / "checkpoints"))
    assert not (tmp_path / "run").exists()


def test_a_process_id_that_another_process_has_now_is_dead(tmp_path: Path) -> None:
    parent = os.getppid()
    write_lock(tmp_path, process=parent, process_start=started_at(parent))
    with pytest.raises(ConfigError, match=rf"process {parent}"):
        RunLock().take("--output_dir", tmp_path)
    write_lock(tmp_path, process=parent, process_start=started_at(parent) - 100)
    RunLock().take("--output_dir", tmp_path)


def test_setting_the_clock_neither_kills_a_live_owner_nor_makes_another_process_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil counts a process's start from a boot time that moves with the clock."""
    write_lock(tmp_path, process=os.getppid(), process_start=started_at(os.getppid()))
    boot_time = psutil.boot_time()
    for shift in (-7200, 7200):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda shift=shift: boot_time + shift)
        monkeypatch.setattr("psutil._pslinux.BOOT_TIME", boot_time + shift, raising=False)
        monkeypatch.setattr(time, "time", lambda shift=shift, now=time.time: now() + shift)
        with pytest.raises(ConfigError, match="is in use by"):
            find_dead("--output_dir", tmp_path)
        monkeypatch.undo()


@pytest.mark.parametrize("text", [None, ""], ids=["of another machine", "not written yet"])
def test_a_process_that_cannot_be_looked_at_lives_as_long_as_it_touches_the_file(
    text: str | None, tmp_path: Path
) -> None:
    write_lock(tmp_path, machine="another", host="node7")
    if text is not None:
        (tmp_path / "lock.json").write_text(text)
    stopped = threading.Event()

    def touch() -> None:
        while not stopped.wait(0.2):
            os.utime(tmp_path / "lock.json")

    thread = threading.Thread(target=touch)
    thread.start()
    by = "a run on node7" if text is None else "a run that has just begun"
    with pytest.raises(ConfigError, match=f"is in use by {by}"):
        find_dead("--output_dir", tmp_path, stale_seconds=5)
    stopped.set()
    thread.join()
    started = time.monotonic()
    assert find_dead("--output_dir", tmp_path, stale_seconds=1) is not None
    assert time.monotonic() - started >= 1, "it might have touched it"
    RunLock(stale_seconds=0.1).take("--output_dir", tmp_path)
    assert owner(tmp_path)["process"] == os.getpid()


def test_a_file_that_was_not_touched_for_long_is_not_waited_for(tmp_path: Path) -> None:
    write_lock(tmp_path, machine="another")
    os.utime(tmp_path / "lock.json", (time.time() - 3600, time.time() - 3600))
    started = time.monotonic()
    RunLock().take("--output_dir", tmp_path)
    assert time.monotonic() - started < STALE_SECONDS / 2


@pytest.fixture
def shared_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if other machines, too, wrote to the disk of these folders."""
    monkeypatch.setattr("run_folder.lock.is_on_local_disk", lambda folder: False)


@pytest.mark.usefixtures("shared_disk")
def test_a_run_touches_its_file_often_enough_and_only_as_long_as_it_is_its_own(tmp_path: Path) -> None:
    assert 3 * BEAT_SECONDS <= STALE_SECONDS
    lost: list[str] = []
    lock = RunLock(beat_seconds=0.05, on_loss=lost.append)
    lock.take("--output_dir", tmp_path)
    before = (tmp_path / "lock.json").stat().st_mtime_ns
    deadline = time.monotonic() + 120
    while (tmp_path / "lock.json").stat().st_mtime_ns == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    taken_over = owner(tmp_path) | {"token": "of another run"}
    (tmp_path / "other").write_text(json.dumps(taken_over))
    (tmp_path / "other").rename(tmp_path / "lock.json")
    while not lost:  # it may be about to touch the file
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = (tmp_path / "lock.json").stat().st_mtime_ns
    time.sleep(0.3)
    assert (tmp_path / "lock.json").stat().st_mtime_ns == before
    lock.release()
    assert owner(tmp_path) == taken_over


@pytest.mark.slow
def test_of_several_runs_that_find_a_dead_one_one_gets_the_folder(hold: Hold, tmp_path: Path) -> None:
    dead = hold(tmp_path)
    assert said(dead) == "held"
    dead.kill()
    dead.wait()
    answers = [said(process) for process in [hold(tmp_path) for _ in range(5)]]
    assert answers.count("held") == 1
    assert sum("is in use by a run" in answer for answer in answers) == 4, answers
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = default_name("models/tiny", ["samsum_dataset"])
    seconds = [run_folder.default_folders.datetime(2026, 1, 2, 3, 4, second) for second in (5, 5, 5, 6)]

    class Clock:
        @staticmethod
        def now() -> Any:
            return seconds.pop(0)

    monkeypatch.setattr(run_folder.default_folders, "datetime", Clock)
    folders = [make_default_folder(tmp_path / "outputs", name) for _ in range(4)]
    first = "tiny-samsum-20260102-030405"
    assert [folder.name for folder in folders] == [first, f"{first}-2", f"{first}-3", "tiny-samsum-20260102-030406"]
    for newest in folders:
        (newest / "run.yaml").touch()
        assert default_folders(tmp_path / "outputs", name)[0] == newest


@pytest.mark.parametrize("name", ["m" * 255, "ä" * 127])
def test_the_default_folder_of_a_model_with_a_long_name_can_be_made(name: str, tmp_path: Path) -> None:
    name = default_name(f"models/{name}", ["samsum_dataset"])
    folder = make_default_folder(tmp_path, name)
    (folder / "run.yaml").touch()
    assert default_folders(tmp_path, name) == [folder]


@pytest.mark.usefixtures("shared_disk")
def test_a_folder_that_is_deleted_is_said_once_and_held_again_when_it_is_back(tmp_path: Path) -> None:
    said_lines: list[str] = []
    lock = RunLock(beat_seconds=0.02, say=said_lines.append)
    lock.take("--output_dir", tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "away")
    deadline = time.monotonic() + 120
    while not said_lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.1)  # several beats
    assert len(said_lines) == 1
    assert f"{tmp_path / 'run/lock.json'} is gone, deleted or moved with its folder; the run goes on" in said_lines[0]
    (tmp_path / "run").mkdir()
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/lock.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert owner(tmp_path / "run")["process"] == os.getpid()
    lock.release()
    assert not (tmp_path / "run/lock.json").exists()
    assert len(said_lines) == 1


def test_a_clock_of_this_machine_that_is_wrong_takes_no_live_lock_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was touched a second ago, by the file server's clock."""
    write_lock(tmp_path, machine="another")
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 7200)
    started = time.monotonic()
    assert find_dead("--output_dir", tmp_path, stale_seconds=0.5) is not None
    assert time.monotonic() - started >= 0.5, "it might have touched it"


# A disk of this machine: the kernel keeps the lock


def looks_like_of_another_machine(folder: Path) -> None:
    """As a container sees the lock that another one holds: the process cannot be looked at, and touches nothing."""
    (folder / "lock.json").write_text(json.dumps(owner(folder) | {"machine": "another"}))  # the same file
    os.utime(folder / "lock.json", (time.time() - 3600, time.time() - 3600))


def test_a_process_that_cannot_be_looked_at_holds_its_folder_until_it_ends_and_touches_nothing(
    hold: Hold, tmp_path: Path
) -> None:
    first = hold(tmp_path)
    assert said(first) == "held"
    looks_like_of_another_machine(tmp_path)
    before = (tmp_path / "lock.json").stat().st_mtime_ns
    time.sleep(0.5)  # five beats, if there were any
    assert (tmp_path / "lock.json").stat().st_mtime_ns == before
    assert holder_of(tmp_path) is not None
    with pytest.raises(ConfigError, match=rf"is in use by a run on \S+ \(process {first.pid}, since "):
        RunLock().take("--output_dir", tmp_path)
    first.kill()
    first.wait()
    assert holder_of(tmp_path) is None
    RunLock().take("--output_dir", tmp_path)


def test_a_forked_worker_neither_keeps_the_lock_of_a_killed_run_nor_deletes_that_of_a_living_one(
    hold: Hold, tmp_path: Path
) -> None:
    for ends_first in ("worker", "run"):
        folder = tmp_path / ends_first
        run = hold(folder, worker=True)
        held, worker = said(run).split()
        assert held == "held"
        looks_like_of_another_machine(folder)
        if ends_first == "worker":
            # It leaves the lock's context as the run would. Python loses a signal that comes while it forks.
            deadline = time.monotonic() + 60
            while not has_ended_by_sigint(int(worker)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert holder_of(folder) is not None
            continue
        run.kill()
        run.wait()
        assert psutil.pid_exists(int(worker))
        RunLock().take("--output_dir", folder)
        os.kill(int(worker), signal.SIGKILL)


def test_a_folder_that_is_renamed_and_back_is_still_held(tmp_path: Path) -> None:
    with RunLock() as lock:
        lock.take("--output_dir", tmp_path / "run")
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "away").rename(tmp_path / "run")
        assert is_locked(tmp_path / "run/lock.json")
    assert not (tmp_path / "run").exists()


def test_disks_that_other_hosts_may_write_to_are_told_from_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [("/", "ext4"), ("/home", "nfs4"), ("/home/ann/fast", "xfs"), ("/scratch", "lustre"), ("/mnt", "beegfs")]
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in [*mounts, ("/scratch", "fuse.sshfs")]]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    local = [place for place, _ in mounts if is_on_local_disk(Path(place, "run"))]
    assert local == ["/", "/home/ann/fast"]


# A whole run


def endless(bench: Bench, *given: str, before_reading: str = "") -> list[str]:
    """Many short steps, a checkpoint now and then."""
    rows = bench.dataset_function(f"{before_reading}return [{{'input_ids': [5, 6, 7], 'labels': [5, 6, 7]}}] * 64")
    steps = ["--num_epochs", "999"]
    for flag, value in (("--save_every_steps", "50"), ("--run_validation", "False")):
        steps += [] if flag in given else [flag, value]
    return bench.flags(*rows, *steps, "--batch_size_training", "1", "--batching_strategy", "padding", *given)


def waits_at(files: dict[int, Path]) -> str:
    """Code of a dataset function: a rank that has read so many training rows waits until the file is there."""
    return textwrap.dedent(f"""\
        import pathlib, time
        from data.batches.rows import Rows
        files, reads = { {number: str(file) for number, file in files.items()} }, []
        def wait_and_read(rows, index, read=Rows.__getitem__):
            reads.append(index)
            while len(reads) in files and not pathlib.Path(files[len(reads)]).exists():
                time.sleep(0.01)
            return read(rows, index)
        if split == "train":
            Rows.__getitem__ = wait_and_read
        """)


def trained_steps(folder: Path) -> list[int]:
    return [event["step"] for event in train_events(folder)] if (folder / "metrics.jsonl").exists() else []


@pytest.fixture
def launch(bench: Bench) -> Iterator[Callable[..., RunningCommand]]:
    started: list[RunningCommand] = []

    def launch(*flags: str, world_size: int = 1, torchrun: bool = False, **given: Any) -> RunningCommand:
        log = bench.folder / f"log-{len(started)}"
        started.append(
            RunningCommand(*flags, world_size=world_size, torchrun=torchrun, log=log, **SHORT_GRACE, **given)
        )
        return started[-1]

    yield launch
    for run in started:
        run.kill()


def test_of_two_runs_begun_at_the_same_moment_one_is_refused(
    bench: Bench, launch: Callable[..., RunningCommand]
) -> None:
    """Both with --resume auto, and an empty folder; there is one line for each step, and every checkpoint is good."""
    # Each reads its rows after it has found no checkpoint, and before it takes the folder. There they meet.
    meet = f"""\
        import pathlib, time
        here = pathlib.Path({str(bench.folder)!r})
        (here / f"reads-{{os.getpid()}}").touch()
        while len(list(here.glob("reads-*"))) < 2:
            time.sleep(0.01)
        """
    flags = endless(bench, "--resume", "auto", "--max_train_step", "150", before_reading=textwrap.dedent(meet))
    runs = [launch(*flags) for _ in range(2)]
    statuses = [run.wait(300)[0] for run in runs]
    logs = [run.log.read_text() for run in runs]
    assert sorted(statuses) == [0, 2], logs
    # The other run has written its name into its lock, has not yet, or has ended since.
    refusal = "error: .*(is in use by a run (on|that has just begun)|another run wrote into)"
    assert re.search(refusal, logs[statuses.index(2)]), logs
    assert trained_steps(bench.output) == list(range(1, 151))
    assert [damage(folder) for folder in checkpoints(bench.output / "checkpoints")] == ["", ""]


@pytest.mark.slow
def test_a_run_whose_folder_was_taken_while_it_was_held_up_ends_and_writes_no_more(
    bench: Bench, launch: Callable[..., RunningCommand]
) -> None:
    """As after a machine slept for minutes, on a shared disk: both ranks end, with status 1 and a line."""
    run = launch(*endless(bench), world_size=2, script="tests/helpers/without_locks.py")
    wait_until(lambda: len(trained_steps(bench.output)) > 5, run)
    (bench.folder / "other").write_text(json.dumps(owner(bench.output) | {"token": "of another run", "host": "node7"}))
    (bench.folder / "other").rename(bench.output / "lock.json")
    assert run.wait(300) == [1, 1]
    assert f"error: {bench.output} is in use by a run on node7" in run.log.read_text()
    assert "end" not in [event["event"] for event in read_metrics(bench.output)]
    assert owner(bench.output)["token"] == "of another run"


@pytest.mark.slow
def test_a_requeued_job_is_refused_while_ranks_of_a_killed_torchrun_still_train(
    bench: Bench, launch: Callable[..., RunningCommand]
) -> None:
    flags = endless(bench)
    first = launch(*flags, world_size=2, torchrun=True, SLURM_JOB_ID="7")
    wait_until(lambda: len(trained_steps(bench.output)) > 5, first)
    ranks = [first.rank(0), first.rank(1)]
    os.kill(first.started[0].pid, 9)
    again = run_command(*flags, nproc=2, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1", **SHORT_GRACE)
    assert again.returncode != 0
    assert f"error: --output_dir: {bench.output} is in use by a run on " in again.stderr
    num_trained = len(trained_steps(bench.output))
    wait_until_trained = time.monotonic() + 300
    while len(trained_steps(bench.output)) == num_trained:
        assert time.monotonic() < wait_until_trained, "the first ranks go on"
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
    steps = trained_steps(bench.output)
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("given", [("--overwrite",), ("--resume", "auto")])
def test_a_run_is_refused_a_folder_in_use_and_writes_nothing(given: tuple[str, ...], bench: Bench, hold: Hold) -> None:
    holder = hold(bench.output)
    assert said(holder) == "held"
    os.kill(holder.pid, 19)  # SIGSTOP: it lives, and touches nothing
    (bench.output / "run.yaml").write_text("settings: {}\n")
    line = bench.refused(*given, world_size=2)
    assert re.search(rf"--output_dir: {bench.output} is in use by a run on \S+ \(process {holder.pid}, since ", line)


def test_a_run_is_refused_a_checkpoint_folder_in_use(bench: Bench, hold: Hold) -> None:
    holder = hold(bench.folder / "elsewhere/fine-tuned-tiny")
    assert said(holder) == "held"
    os.kill(holder.pid, 19)
    line = bench.refused("--dist_checkpoint_root_folder", str(bench.folder / "elsewhere"))
    assert f"--dist_checkpoint_folder: {bench.folder / 'elsewhere/fine-tuned-tiny'} is in use by a run on " in line


def test_a_run_holds_its_folder_and_gives_it_back_when_it_ends(bench: Bench, hold: Hold) -> None:
    """Though it fails: by its dataset function, which sees the lock of a run that has begun, and raises."""
    dead = hold(bench.output)
    assert said(dead) == "held"
    dead.kill()
    dead.wait()
    given = ["--batch_size_training", "2", "--max_train_step", "2", "--run_validation", "False", "--overwrite"]
    elsewhere = bench.folder / "elsewhere"
    bench.group.train(bench.flags(*given, "--dist_checkpoint_root_folder", str(elsewhere)), 2)
    assert not list(bench.folder.rglob("lock.json"))
    failing = ["--optimizer", "SGD", "--lr", "1e18", "--batch_size_training", "1", "--overwrite"]
    assert bench.group.run(bench.flags(*failing), 1)[0].status == 1
    assert (bench.output / "metrics.jsonl").exists()
    assert not list(bench.folder.rglob("lock.json"))


@pytest.mark.slow
def test_a_folder_that_is_renamed_for_a_while_costs_the_run_nothing(
    bench: Bench, launch: Callable[..., RunningCommand]
) -> None:
    is_away, is_back = bench.folder / "is_away", bench.folder / "is_back"
    waiting = waits_at({100: is_away, 200: is_back})
    run = launch(*endless(bench, "--save_every_steps", "0", "--max_train_step", "300", before_reading=waiting))
    wait_until(lambda: len(trained_steps(bench.output)) > 5, run)
    bench.output.rename(bench.folder / "away")
    is_away.touch()
    said_so = "metrics.jsonl cannot be written (No such file or directory); its lines wait"
    wait_until(lambda: said_so in run.log.read_text(), run)
    (bench.folder / "away").rename(bench.output)
    is_back.touch()
    assert run.wait(300) == [0]
    log = run.log.read_text()
    assert log.count(said_so) == 1
    assert trained_steps(bench.output) == list(range(1, 301))
    assert (bench.output / "model").is_dir()


@pytest.mark.slow
def test_a_run_whose_folder_was_deleted_keeps_its_state_in_a_new_one_and_says_at_the_end_what_is_gone(
    bench: Bench, launch: Callable[..., RunningCommand]
) -> None:
    """The best weights were those of the first evaluation: nothing is learned."""
    given = ["--run_validation", "True", "--max_eval_step", "1", "--lr", "1e-20", "--max_train_step", "120"]
    is_away = bench.folder / "is_away"
    flags = endless(bench, *given, "--resume", "auto", before_reading=waits_at({90: is_away}))
    run = launch(*flags, world_size=2)
    wait_until(lambda: (bench.output / "model").exists() and "saved" in read_run_yaml(bench.output), run)
    bench.output.rename(bench.folder / "away")
    is_away.touch()
    assert run.wait(300) == [1, 1]
    log = run.log.read_text()
    assert log.count("lock.json is gone, deleted or moved with its folder; the run goes on") <= 1
    lines = len((bench.folder / "away/metrics.jsonl").read_text().splitlines())
    (line,) = {line.partition("error: ")[2] for line in log.splitlines() if "error: " in line}
    assert f"finished step 120 of 120, but {bench.output}/model, with the weights of step 32, is gone; " in line
    assert f"{bench.output}/metrics.jsonl lacks {plural(lines, 'line')} (deleted or moved away); " in line
    assert read_metrics(bench.output)[-1]["status"] == "failed"
    assert damage(checkpoints(bench.output / "checkpoints")[0]) == ""
    assert not (bench.output / "lock.json").exists()

    again = launch(*flags, world_size=2)
    assert again.wait(300) == [0, 0], again.log.read_text()
    assert "after step 120" in again.log.read_text()
    assert (bench.output / "model/model.safetensors").exists()
