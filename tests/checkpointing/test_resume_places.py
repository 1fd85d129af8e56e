"""Where a resumed run finds its checkpoints. It never overwrites anything of another run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from configs.flags import parse_flags
from ranks.environment import Environment
from run_folder.checkpoint_folder import checkpoints
from run_folder.other_runs import run_folder_of
from run_folder.resuming import settle_resume
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import PLAIN, as_if_killed_after, assert_bit_equal, flags_of
from utils.errors import ConfigError


def contents(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_run_whose_checkpoints_go_elsewhere_from_now_on_goes_on_from_those_it_has(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """There and back again, even if it ends before it has written one in the new place."""
    run = as_if_killed_after(3, whole, tmp_path / "run")
    elsewhere = ["--dist_checkpoint_root_folder", str(tmp_path / "elsewhere")]
    unsaved = ["--save_every_steps", "0", "--max_train_step", "4"]
    process_group.train(flags_of(tiny_model, run, *PLAIN, *elsewhere, *unsaved, "--resume", "auto"), 1)
    moved = process_group.train(
        flags_of(tiny_model, run, *PLAIN, *elsewhere, "--max_train_step", "6", "--resume", "auto"), 1
    )[0]
    assert f"resume: from {run}/checkpoints/step-00000003" in moved.stdout
    assert [folder.name for folder in checkpoints(tmp_path / "elsewhere/fine-tuned-tiny")] == ["step-00000006"]
    shutil.rmtree(run / "checkpoints")
    back = process_group.train(flags_of(tiny_model, run, *PLAIN, "--resume", "auto"), 1)[0]
    assert f"resume: from {tmp_path}/elsewhere/fine-tuned-tiny/step-00000006" in back.stdout
    assert_bit_equal(run, whole)


def test_a_run_that_began_from_another_ones_checkpoint_and_has_none_yet_begins_from_it_again(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    from_path = ["--resume", str(whole / "checkpoints/step-00000003")]
    unsaved = ["--save_every_steps", "0", "--max_train_step", "4"]
    process_group.train(flags_of(tiny_model, tmp_path / "run", *PLAIN, *unsaved, *from_path), 1)
    process_group.train(flags_of(tiny_model, tmp_path / "run", *PLAIN, "--resume", "auto"), 1)
    assert_bit_equal(tmp_path / "run", whole)


def test_a_checkpoint_of_one_run_does_not_go_on_in_the_folder_of_another(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Nor in the folder of a run that itself began from that checkpoint."""
    from_path = ["--resume", str(whole / "checkpoints/step-00000003")]
    process_group.train(flags_of(tiny_model, tmp_path / "other", *PLAIN, "--seed", "1"), 1)
    process_group.train(flags_of(tiny_model, tmp_path / "began", *PLAIN, *from_path), 1)
    for run in (tmp_path / "other", tmp_path / "began"):
        before = contents(run)
        outcome = process_group.run(flags_of(tiny_model, run, *PLAIN, *from_path), 1)[0]
        assert outcome.status == 2
        assert f"--output_dir: {run} already holds another run" in outcome.stderr
        assert contents(run) == before


def test_a_run_that_went_back_never_goes_on_from_the_course_it_gave_up(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """Even if it ends before its first new checkpoint, or passes steps of which the given-up course had checkpoints."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    root = run / "checkpoints"
    (root / "best").write_text("step-00000006\n")
    back = ["--resume", str(root / "step-00000003"), "--save_every_steps", "0"]
    process_group.train(flags_of(tiny_model, run, *PLAIN, *back, "--max_train_step", "4"), 1)
    assert {path.name for path in root.glob("step-*")} == {
        "step-00000003",
        "step-00000006.given-up",
        "step-00000008.given-up",
    }
    assert not (root / "best").exists()
    again = flags_of(tiny_model, run, *PLAIN, "--resume", "auto", "--save_every_steps", "7", "--max_train_step", "7")
    assert "after step 3" in process_group.train(again, 1)[0].stdout
    assert {path.name for path in root.glob("step-*")} == {"step-00000003", "step-00000007"}


def test_a_path_is_found_to_be_of_its_run_from_inside_it_too(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole / "checkpoints")
    assert run_folder_of(Path("step-00000003")) == whole


@pytest.mark.parametrize(
    ("there", "reason"), [(False, "there is no {path}; give a run's"), (True, "is in no run folder")]
)
def test_a_resume_path_that_is_no_run_is_refused(there: bool, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "step-00000003"
    if there:
        path.mkdir()
    config = parse_flags(["--model_name", "m", "--resume", str(path)])
    with pytest.raises(ConfigError, match=f"^--resume: .*{reason.format(path=path)}"):
        settle_resume(config, Environment(0, 0, 1, 1, launched=False))


@pytest.mark.parametrize(
    ("job", "earlier", "resume"),
    [
        ("slurm-7", "slurm-6", None),
        ("slurm-7", "null", None),
        ("slurm-7", "slurm-7", "auto"),
    ],
)
def test_a_job_restarted_before_it_overwrote_an_earlier_run_overwrites_it(
    job: str, earlier: str, resume: str | None, tmp_path: Path
) -> None:
    """It resumes its own run."""
    (tmp_path / "run.yaml").write_text(f"job: {earlier}\nstarted: 2026-01-01T00:00:00+00:00\n")
    config = parse_flags(["--model_name", "m", "--output_dir", str(tmp_path), "--overwrite"])
    env = Environment(0, 0, 1, 1, launched=True, job=job, restarted=True)
    train = settle_resume(config, env).train_config
    assert (train.resume, train.overwrite) == (resume, resume is None)


@pytest.mark.parametrize("started", ["1999-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
def test_a_restarted_job_knows_its_own_run_whatever_the_clock_said_when_it_began(started: str, tmp_path: Path) -> None:
    """By torchrun's process. With --overwrite it would delete its own checkpoints if it did not."""
    (tmp_path / "run.yaml").write_text(f"job: none\nlauncher: machine 7 123\nstarted: {started}\n")
    config = parse_flags(["--model_name", "m", "--output_dir", str(tmp_path), "--overwrite"])
    for launcher, is_own in (("machine 7 123", True), ("machine 7 456", False)):
        env = Environment(0, 0, 1, 1, launched=True, job="none", restarted=True, launcher=launcher)
        train = settle_resume(config, env).train_config
        assert (train.resume, train.overwrite) == (("auto", False) if is_own else (None, True))
