"""A disk that takes nothing for a while costs a run nothing; one that takes nothing to the end costs it its status 0.

The run's folder lies on a disk of its own. A dataset function fills it, or makes it read-only, while the run trains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from checkpointing.writing import complete
from run_folder.checkpoint_folder import LATEST, checkpoints, damage, point_to, temporary_folder, write_synced
from tests.helpers.limited_files import files_limited_to
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ROOT, ProcessGroup, read_metrics, run_forked
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import assert_bit_equal, flags_of

RECIPE = """
import os, subprocess
from data.batches.rows import Rows
from tests.helpers import random_documents

read, folder = Rows.__getitem__, {folder!r}
ballast = os.path.join(folder, "ballast")

def fill():
    with open(ballast, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return

def make_room():
    os.unlink(ballast)

def put_in_the_way():
    open(os.path.join(folder, "run/model.incomplete"), "w").close()

def read_only():
    # The run's lock is open for writing, so its own mount stays writable: paths lead to a read-only one on top of it.
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)

class Reads:
    number = 0

def read_and(rows, index):
    Reads.number += len(rows) > 20  # not of the evaluation
    {plant}
    return read(rows, index)

Rows.__getitem__ = read_and

def get_rows(dataset_config, tokenizer, split):
    return random_documents.get_custom_dataset(dataset_config, tokenizer, split)
"""

# Four rows a step: what is planted at row 4 * N + 1 happens after step N, but for its checkpoint, which may be later.
STEPS = 12
GIVEN = ["--max_train_step", str(STEPS), "--num_epochs", "3", "--async_save", "False", "--save_every_steps", "3"]
EVALUATED = [*GIVEN, "--eval_every_steps", "3"]


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.py").write_text(RECIPE.format(folder="", plant=""))
    process_group.train(
        flags_of(tiny_model, folder / "run", *EVALUATED, "--dataset", f"{folder}/recipe.py:get_rows"), 1
    )
    return folder / "run"


class OnOwnDisk:
    """Runs on a disk of 40 MB, where `plant` is called for each row of training data."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.disk = model, folder, folder / "disk"
        self.disk.mkdir()
        self.dataset = f"{folder}/recipe.py:get_rows"

    def write_recipe(self, plant: str) -> None:
        (self.folder / "recipe.py").write_text(RECIPE.format(folder=str(self.disk), plant=plant))

    def run(self, plant: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        """How it ended, and a copy of what it left."""
        copy = self.folder / "copy"
        self.write_recipe(plant)
        given = flags_of(self.model, self.disk / "run", *(flags or EVALUATED), "--dataset", self.dataset)
        words = [str(self.disk), "40m", str(copy), str(ROOT / "finetuning.py"), *given]
        return run_forked([str(ROOT / "tests/helpers/own_disk.py"), *words]), copy / "run"


@pytest.fixture
def on_own_disk(tiny_model: Path, tmp_path: Path) -> OnOwnDisk:
    return OnOwnDisk(tiny_model, tmp_path)


def kinds(run: Path) -> list[tuple[str, int | None]]:
    return [(event["event"], event.get("step")) for event in read_metrics(run)]


def failed_saves(log: str) -> list[str]:
    return re.findall(r"checkpoint of step \d+ failed: .*$", log, re.MULTILINE)


def test_a_disk_that_is_full_for_a_while_costs_nothing_in_the_end(on_own_disk: OnOwnDisk, whole: Path) -> None:
    """Checkpoint and weights of step 6 are lost, lines of metrics.jsonl come late, and later ones make it good."""
    done, run = on_own_disk.run("fill() if Reads.number == 17 else make_room() if Reads.number == 33 else None")
    assert done.returncode == 0, done.stderr + done.stdout
    (failed,) = failed_saves(done.stdout)
    assert failed.startswith("checkpoint of step 6 failed: ")
    assert failed.endswith("the run goes on, and the next one tries again")
    assert not error_lines(done.stderr)
    assert_bit_equal(run, whole)
    everything = [event for event in kinds(whole) if event != ("checkpoint", 6)]
    assert kinds(run) == everything, "each line, in its order"


def test_best_weights_that_alone_were_lost_are_evaluated_and_saved_after_resuming(
    on_own_disk: OnOwnDisk, whole: Path, process_group: ProcessGroup
) -> None:
    """The checkpoint of their step is whole."""
    done, run = on_own_disk.run("put_in_the_way() if Reads.number == 45 else None")
    assert done.returncode == 1, done.stderr + done.stdout
    (error,) = error_lines(done.stderr)
    assert "but the best weights, those of step 12, could not be saved: " in error
    assert error.endswith(
        "/model holds those of step 9; free the disk, or bring the folder back, and give --resume auto"
    )
    (run / "model.incomplete").unlink()
    on_own_disk.write_recipe("")
    given = [*EVALUATED, "--dataset", on_own_disk.dataset, "--resume", "auto"]
    process_group.train(flags_of(on_own_disk.model, run, *given), 1)
    assert_bit_equal(run, whole)
    evals = [[event for event in read_metrics(of) if event["event"] == "eval"] for of in (run, whole)]
    assert [[(eval["step"], eval["epoch"]) for eval in of] for of in evals] == [[(3, 1), (6, 1), (9, 1), (12, 1)]] * 2


@pytest.mark.parametrize(
    ("plant", "reason"), slow_but(1, [("fill()", "No space left"), ("read_only()", "Read-only file system")])
)
def test_a_run_whose_disk_takes_nothing_to_the_end_fails_and_says_what_is_where(
    on_own_disk: OnOwnDisk,
    whole: Path,
    plant: str,
    reason: str,
    tiny_model: Path,
    process_group: ProcessGroup,
) -> None:
    done, run = on_own_disk.run(f"{plant} if Reads.number == 25 else None")
    assert done.returncode == 1, done.stderr + done.stdout
    (error,) = error_lines(done.stderr)
    assert "Traceback" not in done.stderr
    disk = on_own_disk.disk / "run"
    what = f"the checkpoint of step {STEPS} could not be written"
    assert error.startswith(f"error: finished step {STEPS} of {STEPS}, but {what}: the newest is that of step 6, ")
    newest, *_ = checkpoints(run / "checkpoints")
    assert damage(newest) == ""
    assert f" {disk}/checkpoints/{newest.name}; the best weights, those of step 12, could not be saved: " in error
    assert f"{disk}/model holds those of step 6; " in error
    assert error.endswith("; free the disk, or bring the folder back, and give --resume auto")
    lacking = int(re.search(rf"{disk}/metrics.jsonl lacks (\d+) line", error)[1])
    lines = (run / "metrics.jsonl").read_text()
    assert lines.endswith("}\n")
    assert "finished" not in lines
    everything = [event for event in kinds(whole) if event not in (("checkpoint", 9), ("checkpoint", 12))]
    assert kinds(run) == everything[:-lacking]
    assert done.stdout.count("metrics.jsonl cannot be written") == 1
    first, last = failed_saves(done.stdout)
    assert first.endswith("; the run goes on, and the next one tries again")
    assert not last.endswith("tries again")
    assert reason in done.stdout

    on_own_disk.write_recipe("")
    given = [*EVALUATED, "--dataset", on_own_disk.dataset, "--resume", "auto"]
    process_group.train(flags_of(tiny_model, run, *given), 1)
    assert_bit_equal(run, whole)


def test_a_full_disk_that_leaves_nothing_is_said_and_so_is_a_stop_without_its_checkpoint(
    on_own_disk: OnOwnDisk,
) -> None:
    done, run = on_own_disk.run("fill() if Reads.number == 1 else None", *GIVEN, "--run_validation", "False")
    assert done.returncode == 1, done.stderr + done.stdout
    (error,) = error_lines(done.stderr)
    assert f"the checkpoint of step {STEPS} could not be written, and there is none before it; " in error
    assert f"the last weights, those of step {STEPS}, could not be saved: none are saved; " in error
    assert not (run / "model").exists()

    shutil.rmtree(run.parent)
    done, run = on_own_disk.run("(fill(), os.kill(os.getpid(), 15)) if Reads.number == 25 else None")
    assert done.returncode == 1, done.stderr + done.stdout
    (error,) = error_lines(done.stderr)
    assert re.match(
        r"error: stopped by SIGTERM after step [67] of 12, but the checkpoint of step [67] could not ", error
    )
    assert "to go on, give the same command" not in done.stdout


@pytest.mark.parametrize(("size", "takes"), [("4k", "config.json"), ("12k", "all but the tokenizer")])
def test_a_full_folder_for_temporary_files_is_named_and_nothing_is_written(
    size: str, takes: str, tiny_model: Path, tmp_path: Path
) -> None:
    disk, recipe, run = tmp_path / "disk", tmp_path / "recipe.py", tmp_path / "run"
    disk.mkdir()
    # As TMPDIR would have it, which Python has read before the process was forked.
    recipe.write_text(
        f"import tempfile\nfrom tests.helpers.random_documents import *\ntempfile.tempdir = {str(disk)!r}\n"
    )
    words = [str(disk), size, str(tmp_path / "copy"), str(ROOT / "finetuning.py")]
    words += flags_of(tiny_model, run, "--max_train_step", "1", "--dataset", f"{recipe}:get_custom_dataset")
    done = run_forked([str(ROOT / "tests/helpers/own_disk.py"), *words])
    assert done.returncode == 2, done.stderr + done.stdout
    assert error_lines(done.stderr) == [
        f"error: the model's config and tokenizer cannot be written in {disk} (No space left on device); make room "
        "there, or name another place with the variable TMPDIR"
    ]
    assert "Traceback" not in done.stderr
    assert not run.exists()


def test_older_checkpoints_that_cannot_be_listed_do_not_fail_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = temporary_folder(tmp_path / "step-00000003")
    temporary.mkdir()
    files = {"state.json": write_synced(temporary / "state.json", b"{}")}

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("checkpointing.writing.keep_only", refuse)
    assert complete(tmp_path / "step-00000003", files, keep_last=1, best=True) == 2
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000003"]
    assert (tmp_path / "best").read_text() == (tmp_path / "latest").read_text() == "step-00000003\n"


def test_a_pointer_that_cannot_be_moved_names_the_checkpoint_before(tmp_path: Path) -> None:
    point_to(tmp_path / "step-00000003", LATEST)
    with files_limited_to(0), pytest.raises(OSError, match="cannot be written") as refused:
        point_to(tmp_path / "step-00000006", LATEST)
    assert str(refused.value) == f"{tmp_path}/latest cannot be written (File too large)"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"latest": "step-00000003\n"}
    point_to(tmp_path / "step-00000006", LATEST)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"latest": "step-00000006\n"}
