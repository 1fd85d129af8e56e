"""A damaged or failed checkpoint is reported in a line, and the run resumes from the complete one before it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing.folder import checkpoints, checksum, damage, listed_files
from tests.helpers.processes import ROOT, ProcessGroup, command
from tests.helpers.refusals import error_lines
from tests.helpers.resuming import NUM_STEPS, assert_bit_equal, flags_of, results


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a shard cut short": ("__1_0.distcp", cut_short),
    "a shard that is missing": ("__0_0.distcp", Path.unlink),
    "a flipped byte in a shard": ("__0_0.distcp", flip_a_byte),
    "a flipped byte in the metadata": (".metadata", flip_a_byte),
    "metadata that are missing": (".metadata", Path.unlink),
    "a flipped byte in the state": ("state.json", flip_a_byte),
    "random states cut short": ("rng-00001.pt", cut_short),
    "a list of files cut short": ("COMPLETE", cut_short),
}


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, "--enable_fsdp", "--run_validation", "False"), 2)
    return run


@pytest.mark.parametrize("kind", DAMAGE)
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
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith(f"checkpoint: {newest} is damaged: ")]
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
        cut_short(folder / "__0_0.distcp")
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file())
    for path in ("auto", str(run / "checkpoints/step-00000008")):
        given = flags_of(tiny_model, run, "--enable_fsdp", "--run_validation", "False", "--resume", path)
        outcomes = process_group.run(given, 2)
        assert [outcome.status for outcome in outcomes] == [2, 2]
        (line,) = error_lines(outcomes[0].stderr)
        assert "is damaged (__0_0.distcp has " in line
        assert "--overwrite" in line
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()) == before


def test_a_checkpoint_whose_index_is_forged_runs_nothing(
    whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """COMPLETE agrees with the forged index, as an attacker would make it."""

    class Forged:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    newest = checkpoints(run / "checkpoints")[0]
    (newest / ".metadata").write_bytes(pickle.dumps(Forged()))
    files = listed_files(newest) | {".metadata": checksum(newest / ".metadata")}
    (newest / "COMPLETE").write_text(json.dumps({"files": files}))
    given = flags_of(tiny_model, run, "--enable_fsdp", "--run_validation", "False", "--resume", "auto")
    outcome = process_group.run(given, 2)[0]
    assert outcome.status == 2
    assert "posix.system" in outcome.stderr
    assert not (tmp_path / "ran").exists()


def in_own_mounts(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace of its own."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [*namespace, "bash", "-euc", script],
        cwd=ROOT,
        env=environment | {"RUN": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def shell(*words: str) -> str:
    return " ".join(f"'{word}'" for word in words)


@pytest.mark.slow
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tiny_model: Path, whole: Path, tmp_path: Path) -> None:
    """The disk has room for one checkpoint and most of another. With room again, saving continues."""
    run = tmp_path / "run"
    run.mkdir()
    given = flags_of(tiny_model, run, "--run_validation", "False", "--save_model", "False", "--keep_last", "1")
    script = f"""
        mount -t tmpfs -o size=1750k tmpfs "$RUN"
        {shell(*command(*given))} --resume auto
        ls "$RUN/checkpoints"; cat "$RUN/checkpoints/latest"
        mount -o remount,size=20m "$RUN"
        {shell(*command(*given))} --resume auto
        cp -r "$RUN" {shell(str(tmp_path / "after"))}
    """
    done = in_own_mounts(script, run)
    assert done.returncode == 0, done.stderr
    assert "checkpoint | step 3 |" in done.stdout
    assert "checkpoint of step 6 failed: " in done.stdout
    assert "No space left on device" in done.stdout or "GiB free, and a checkpoint needs" in done.stdout
    assert "step-00000003\nstep-00000003\n" in done.stdout  # the only one, and the latest
    assert f"resume: from {run}/checkpoints/step-00000003, after step 3" in done.stdout
    assert len(results(tmp_path / "after")) == NUM_STEPS
    assert [r[2] for r in results(tmp_path / "after")] == pytest.approx([r[2] for r in results(whole)], rel=1e-5)
    assert all(damage(folder) == "" for folder in checkpoints(tmp_path / "after/checkpoints"))


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_costs_the_checkpoints_from_then_on(
    tiny_model: Path, whole: Path, tmp_path: Path
) -> None:
    run, place = tmp_path / "run", tmp_path / "place"
    run.mkdir()
    place.mkdir()
    steps = ["--run_validation", "False", "--save_model", "False", "--max_train_step", "60", "--num_epochs", "9"]
    given = flags_of(tiny_model, run / "r", *steps)
    script = f"""
        mount --bind {shell(str(place))} "$RUN"
        {shell(*command(*given))} &
        while [ ! -e "$RUN/r/checkpoints/latest" ]; do sleep 0.01; done
        until mount -o remount,bind,ro "$RUN" 2>/dev/null; do sleep 0.001; done  # not while a file is being written
        wait
    """
    done = in_own_mounts(script, run)
    assert done.returncode == 0, done.stderr
    assert "failed: [Errno 30] Read-only file system" in done.stdout
    assert "metrics.jsonl cannot be written (Read-only file system); its lines wait until it can be" in done.stdout
    left = checkpoints(place / "r/checkpoints")
    assert left
    assert all(damage(folder) == "" for folder in left)
    refused = in_own_mounts(
        f"""mount --bind {shell(str(place))} "$RUN"; mount -o remount,bind,ro "$RUN"
        {shell(*command(*given))} --resume auto""",
        run,
    )
    assert refused.returncode == 2
    assert f"error: --output_dir: {run}/r cannot be written" in refused.stderr
