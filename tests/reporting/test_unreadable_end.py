"""What was trained and saved decides how a run ends. A file that cannot be read again at its end costs a line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from checkpointing.results import lacking_checkpoint
from planning.against_run import compare_with_plan
from ranks.environment import lone_process
from reporting.metrics_file import MetricsFile
from reporting.trackers import Trackers
from run_folder.run_yaml import read_run_yaml
from run_folder.saved_weights import SavedWeights
from tests.helpers.processes import log_lines, read_metrics, run_forked
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import flags_of

RECIPE = """
import builtins, io, os
from checkpointing.saver import CheckpointSaver
from tests.helpers.random_documents import get_custom_dataset

opened, looked, close = builtins.open, os.stat, CheckpointSaver.close

def fails(path):
    return isinstance(path, (str, os.PathLike)) and os.path.basename(path) in {names!r}

def open_or_fail(path, mode="r", *args, **options):
    if fails(path) and not set("wxa+").intersection(mode):
        raise OSError({number}, os.strerror({number}), os.fspath(path))
    return opened(path, mode, *args, **options)

def stat_or_fail(path, *args, **options):
    if fails(path) and {in_stat}:
        raise OSError({number}, os.strerror({number}), os.fspath(path))
    return looked(path, *args, **options)

def fail_from_now_on(saver):
    close(saver)
    builtins.open = io.open = open_or_fail
    os.stat = stat_or_fail

CheckpointSaver.close = fail_from_now_on
"""
FLAGS = ["--max_train_step", "2", "--save_every_steps", "1", "--save_metrics", "--report", "--run_validation", "False"]


@pytest.mark.parametrize(
    ("number", "in_stat"), [(errno.EIO, False), (errno.ESTALE, True), (errno.ENOENT, False)], ids=["EIO", "ESTALE", ""]
)
def test_files_that_cannot_be_read_at_the_end_are_lines_and_the_run_has_finished(
    number: int, in_stat: bool, tiny_model: Path, tmp_path: Path
) -> None:
    names, run, recipe = ("run.yaml", "metrics.jsonl", "COMPLETE", "model"), tmp_path / "run", tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(names=names, number=number, in_stat=in_stat))
    dataset = ["--dataset", f"{recipe}:get_custom_dataset"]
    done = run_forked([str(Path("finetuning.py").resolve()), *flags_of(tiny_model, run, *FLAGS, *dataset)])
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert not error_lines(done.stderr)
    reason = os.strerror(number)
    assert done.stdout.count(f"{run}/metrics.jsonl cannot be read ({reason}); its figures are left out at the end") == 1
    assert f"metrics_data.json is left out, since {run}/metrics.jsonl cannot be read" in done.stdout
    assert f"weights {run}/model (of step 2)" in done.stdout
    assert log_lines(done.stdout)[-1].startswith("--report: the page could not be written (")
    assert f"finished: {run}" in done.stdout
    *_, end = read_metrics(run)
    assert (end["event"], end["status"], end["step"]) == ("end", "finished", 2)
    assert read_run_yaml(run)["saved"] == {"step": 2, "folder": "model"}


def test_a_checkpoint_that_failed_is_told_although_its_folder_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be looked at neither hides a checkpoint that failed nor makes one fail that was written."""
    root = tmp_path / "checkpoints"
    assert lacking_checkpoint(root, 3, was_written=True) == [
        "the checkpoint of step 3 could not be written, and there is none before it"
    ], "it was written, and deleted since"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    assert lacking_checkpoint(root, 3, was_written=True) == []
    assert lacking_checkpoint(root, 3, was_written=False) == [
        f"the checkpoint of step 3 could not be written, and {root} cannot be read (Input/output error)"
    ]


def test_lines_of_an_unreadable_file_do_not_count_as_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", Trackers(said.append))
    metrics.write("train", step=1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as faulty:
        faulty.setattr("reporting.metrics_file.open_regular", refuse)
        assert (metrics.num_missing(), metrics.read(), metrics.unreadable) == (0, [], "Stale file handle")
        assert len(said) == 1
    assert ([event["step"] for event in metrics.read()], metrics.unreadable) == ([1], "")
    (tmp_path / "metrics.jsonl").unlink()
    assert metrics.num_missing() == 1


def test_run_yaml_is_written_again_from_what_was_last_read(tmp_path: Path) -> None:
    """Its entries of the start are not lost for the one of the saved weights."""
    file = tmp_path / "run.yaml"
    file.write_text("started: today\nsaved: {step: 2, folder: model}\n")
    weights = SavedWeights(lone_process(), tmp_path)
    weights.keep_run_yaml()
    assert weights.read() == {"step": 2, "folder": "model"}
    file.write_text("}{")
    weights.note_saved(3, tmp_path / "model")
    assert read_run_yaml(tmp_path) == {"started": "today", "saved": {"step": 3, "folder": "model"}}


@pytest.mark.parametrize("saved", ["5", "[]", "{step: 1}", "{step: x, folder: model}", "{step: 1, folder: /etc}"])
def test_an_entry_of_saved_weights_that_no_run_writes_is_none(saved: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"saved: {saved}\n")
    assert SavedWeights(lone_process(), tmp_path).read() is None


@pytest.mark.parametrize("plan", [{"peak_gib": "x"}, {"peak_gib": 1.0, "at_peak": 3}, {"peak_gib": 10**400}])
def test_a_plan_that_somebody_wrote_into_is_not_compared(plan: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert compare_with_plan(tmp_path, [], [1.0], has_allocator=True) == []
