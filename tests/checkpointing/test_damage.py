"""A damaged or failed checkpoint is reported in a line, and the run resumes from the complete one before it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.run import RunConfig
from configs.training import TrainConfig
from ranks.environment import lone_process
from run_folder.checkpoint_folder import checkpoints, damage
from run_folder.run_folder import RunFolder
from tests.helpers.pairwise import keep_fast
from tests.helpers.processes import ProcessGroup, log_lines
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import assert_bit_equal, flags_of


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a shard cut short": ("rank-00001.safetensors", cut_short),
    "a shard that is missing": ("rank-00000.safetensors", Path.unlink),
    "a flipped byte in a shard": ("rank-00000.safetensors", flip_a_byte),
    "a flipped byte in the state": ("state.json", flip_a_byte),
    "random states cut short": ("rng-00001.json", cut_short),
    "a list of files cut short": ("COMPLETE", cut_short),
}


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, "--enable_fsdp", "--run_validation", "False"), 2)
    return run


@pytest.mark.parametrize("kind", keep_fast(DAMAGE, ["a flipped byte in a shard", "a list of files cut short"]))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_gone_on_from(
    kind: str, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    name, spoil = DAMAGE[kind]
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest = checkpoints(run / "checkpoints")[0]
    spoil(newest / name)
    given = flags_of(tiny_model, run, "--enable_fsdp", "--run_validation", "False", "--resume", "auto")
    outcome = process_group.train(given, 2)[0]
    (line,) = [line for line in log_lines(outcome.stdout) if line.startswith(f"checkpoint: {newest} is damaged: ")]
    assert name in line
    assert f"resume: from {run}/checkpoints/step-00000006, after step 6" in outcome.stdout
    assert_bit_equal(run, whole)
    assert damage(newest) == ""  # written anew


def test_when_every_checkpoint_is_damaged_the_run_is_refused_and_nothing_is_deleted(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for folder in checkpoints(run / "checkpoints"):
        cut_short(folder / "rank-00000.safetensors")
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file())
    for path in ("auto", str(run / "checkpoints/step-00000008")):
        given = flags_of(tiny_model, run, "--enable_fsdp", "--run_validation", "False", "--resume", path)
        outcomes = process_group.run(given, 2)
        assert [outcome.status for outcome in outcomes] == [2, 2]
        (line,) = error_lines(outcomes[0].stderr)
        assert "is damaged (rank-00000.safetensors has " in line
        assert "--overwrite" in line
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()) == before


def test_newer_checkpoints_that_are_incomplete_are_named_unless_a_checkpoint_was_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    root = run / "checkpoints"
    for name in ("step-00000003", "step-00000006", "step-00000008.given-up"):
        (root / name).mkdir(parents=True)
        (root / name / "COMPLETE").write_text("{}")
    for name in ("step-00000004", "step-00000007", "step-00000012.incomplete", "step-9"):
        (root / name).mkdir()
    (root / "step-00000011").write_text("a file")
    (run / "run.yaml").write_text("settings: {}\n")

    def named(resume: Path | str, taken: int | None, output: Path = run) -> list[str]:
        train = TrainConfig("model", resume=str(resume), output_dir=str(output))
        checkpoint = None if taken is None else root / f"step-{taken:08d}"
        found = RunFolder.plan(RunConfig(train), lone_process()).incomplete_after(checkpoint, taken or 0)
        assert {path.parent for path in found} <= {root}
        return [path.name for path in found]

    newer = ["step-00000012.incomplete", "step-00000007"]
    other = tmp_path / "other"
    assert named("auto", 6) == named(run, 6) == named(root, 6, other) == named(run, 6, other) == newer
    assert named("auto", 3) == named("auto", None) == [*newer, "step-00000004"]
    assert named(root / "step-00000003", 3) == named(root / "step-00000003", 3, other) == []
    assert named("auto", 3, other) == [], "of the run whose checkpoint this one began with"
    folder = RunFolder.plan(RunConfig(TrainConfig("model", output_dir=str(run))), lone_process())
    assert folder.incomplete_after(None, 0) == [], "without --resume"
