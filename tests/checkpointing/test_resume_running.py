"""A checkpoint that its run deletes, since it still trains, is not called damaged: the run is named, and what to do."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from run_folder.checkpoint_folder import checkpoints
from run_folder.lock import RunLock
from tests.helpers import random_documents
from tests.helpers.processes import ProcessGroup, log_lines
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import PLAIN, flags_of


def deleting(file: Path, *folders: Path) -> list[str]:
    """A dataset that deletes folders while it is read, as the run that they are of may."""
    file.write_text(
        "import shutil\n"
        f"from {random_documents.__name__} import get_custom_dataset as documents\n"
        "def get_custom_dataset(*args):\n"
        f"    for folder in {[*map(str, folders)]!r}:\n"
        "        shutil.rmtree(folder, ignore_errors=True)\n"
        "    return documents(*args)\n"
    )
    return ["--dataset", f"{file}:get_custom_dataset"]


def refusal(path: Path, what: str) -> str:
    return (
        f"error: --resume: {path} {what} now: a run on {socket.gethostname()} (process {os.getpid()}, since SINCE) "
        "still goes on there, and deletes older checkpoints as it writes new ones; wait until it ends, stop it, or "
        "copy a checkpoint and give the copy"
    )


def without_time(line: str) -> str:
    before, since, behind = line.partition(", since ")
    return before + since + "SINCE" + behind[behind.index(")") :] if since else line


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpoints_that_are_deleted_while_data_is_read_are_of_a_run_that_goes_on(
    num_ranks: int, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(whole, run)
    folders = checkpoints(run / "checkpoints")
    flags = flags_of(tiny_model, other, *PLAIN, *deleting(tmp_path / "data.py", *folders), "--resume", str(run))
    with RunLock() as lock:
        lock.take("--output_dir", run)
        outcomes = process_group.run(flags, num_ranks)
    assert [outcome.status for outcome in outcomes] == [2] * num_ranks
    (line,) = error_lines(outcomes[0].stderr)
    assert without_time(line) == refusal(folders[-1], "is not there")
    assert "checkpoint: " not in outcomes[0].stdout
    assert not other.exists()


def test_another_checkpoint_of_the_run_is_taken_if_it_is_still_there(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest, older = checkpoints(run / "checkpoints")[:2]
    data = deleting(tmp_path / "data.py", newest)
    flags = flags_of(tiny_model, tmp_path / "other", *PLAIN, *data, "--resume", str(run), "--resume_anyway")
    with RunLock() as lock:
        lock.take("--output_dir", run)
        (outcome,) = process_group.train(flags, 1)
    said = [line for line in log_lines(outcome.stdout) if line.startswith("checkpoint: ")]
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint: {newest} is not there any more; a run on ")
    assert f"resume: from {older}, after step 6" in outcome.stdout


def test_a_path_that_is_gone_before_it_is_looked_for_is_of_a_run_that_goes_on(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = run / "checkpoints/step-00000004"
    elsewhere = ["--output_dir", str(tmp_path / "other")]
    with RunLock() as lock:
        lock.take("--output_dir", run)
        for more in (elsewhere, []):
            flags = [word for word in flags_of(tiny_model, run, *PLAIN) if word not in ("--output_dir", str(run))]
            (outcome,) = process_group.run([*flags, *more, "--resume", str(path)], 1)
            assert outcome.status == 2
            assert [without_time(line) for line in error_lines(outcome.stderr)] == [refusal(path, "is not there")]
        shutil.rmtree(run / "checkpoints")
        (outcome,) = process_group.run([*flags, *elsewhere, "--resume", str(run)], 1)
        assert [without_time(line) for line in error_lines(outcome.stderr)] == [
            refusal(run, "holds no complete checkpoint")
        ]
    (outcome,) = process_group.run([*flags, *elsewhere, "--resume", str(path)], 1)
    (line,) = error_lines(outcome.stderr)
    assert "is not there; give a run folder" in line, "once it has ended"
