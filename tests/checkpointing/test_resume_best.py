"""The best evaluation after a resume: its weights, its checkpoint, and one line for each evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from run_folder.checkpoint_folder import checkpoints
from tests.helpers.checkpoints import forget_marks
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.resuming import flags_of

WORSENING = ["--eval_every_steps", "1", "--warmup_steps", "8", "--lr", "0.3", "--save_every_steps", "1"]


def evaluations(run: Path) -> dict[int, float]:
    events = [event for event in read_metrics(run) if event["event"] == "eval"]
    losses = {event["step"]: event["loss"] for event in events}
    assert len(losses) == len(events)
    return losses


def test_the_best_checkpoint_stays_the_best_where_no_weights_are_saved_beside_it(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    given = [*WORSENING, "--save_model", "False", "--keep_best", "--keep_last", "1"]
    process_group.train(flags_of(tiny_model, tmp_path / "run", *given), 1)
    process_group.train(flags_of(tiny_model, tmp_path / "run", *given, "--max_train_step", "9", "--resume", "auto"), 1)
    losses = evaluations(tmp_path / "run")
    best = min(losses, key=lambda step: losses[step])
    assert best < 8
    assert (tmp_path / "run/checkpoints/best").read_text() == f"step-{best:08d}\n"
    names = [folder.name for folder in checkpoints(tmp_path / "run/checkpoints")]
    assert names == ["step-00000009", f"step-{best:08d}"]


def test_weights_that_are_gone_are_replaced_by_those_of_the_next_evaluation(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    process_group.train(flags_of(tiny_model, tmp_path / "run", *WORSENING), 1)
    shutil.rmtree(tmp_path / "run/model")
    process_group.train(
        flags_of(tiny_model, tmp_path / "run", *WORSENING, "--max_train_step", "9", "--resume", "auto"), 1
    )
    assert (tmp_path / "run/model/config.json").is_file()


def test_an_evaluation_that_a_stop_put_off_is_done_once_and_its_checkpoint_may_be_the_best(
    tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Resumed twice from there, since the session between was killed before its next checkpoint."""
    run, given = tmp_path / "run", ["--keep_best", "--max_train_step", "3"]
    process_group.train(flags_of(tiny_model, run, "--max_train_step", "3", "--run_validation", "False"), 1)
    state_file = run / "checkpoints/step-00000003/state.json"
    values = json.loads(state_file.read_text())
    values["state"] |= {"eval_due": True, "epoch_end_due": True}
    state_file.write_text(json.dumps(values))
    forget_marks(state_file.parent)
    complete = json.loads((state_file.parent / "COMPLETE").read_text())
    del complete["files"]["state.json"]
    (state_file.parent / "COMPLETE").write_text(json.dumps(complete))
    shutil.copytree(state_file.parent, tmp_path / "stopped")
    for _ in range(2):
        shutil.rmtree(state_file.parent)
        shutil.copytree(tmp_path / "stopped", state_file.parent)
        written = state_file.stat()
        process_group.train(flags_of(tiny_model, run, *given, "--resume", "auto"), 1)
        assert list(evaluations(run)) == [3]
        assert [e["event"] for e in read_metrics(run)].count("epoch") == 1
        assert (run / "checkpoints/best").read_text() == f"{state_file.parent.name}\n"
        assert state_file.stat().st_ino == written.st_ino, "a run killed while it replaced its only checkpoint has none"
