"""A checkpoint that was put together from others, or changed and sealed again, does not pass for what was saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.epochs import epochs_of
from checkpointing.marks import foreign_file
from checkpointing.state_json import StateError, read_state
from run_folder.checkpoint_folder import checkpoints, checksum, damage, listed_files
from tests.helpers.processes import ProcessGroup
from tests.helpers.resuming import assert_bit_equal, flags_of
from tools import export

FLAGS = ["--enable_fsdp", "--run_validation", "False", "--max_train_step", "9", "--num_epochs", "3"]
FLAGS += ["--split_slice", "20%"]  # five steps in an epoch


@pytest.fixture(scope="module")
def whole(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    process_group.train(flags_of(tiny_model, run, *FLAGS), 2)
    return run


def seal(folder: Path) -> None:
    """Let COMPLETE agree with the files that are there."""
    names = {*listed_files(folder), *(path.name for path in folder.glob("rank-*"))}
    names = {name for name in names if (folder / name).is_file()}
    (folder / "COMPLETE").write_text(json.dumps({"files": {name: checksum(folder / name) for name in names}}))
    assert damage(folder) == ""


def change_state(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "state.json").read_bytes())
    values["state"] |= changes
    (folder / "state.json").write_text(json.dumps(values))
    seal(folder)


def strip_format(folder: Path) -> None:
    values = json.loads((folder / "state.json").read_bytes())
    del values["format"]
    values["state"] |= {"num_tokens": values["state"]["num_tokens"] + 1}
    (folder / "state.json").write_text(json.dumps(values))
    seal(folder)


def take(name: str, source: str) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        shutil.copy(folder / source, folder / name)
        seal(folder)

    return put


def lose(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        (folder / name).unlink()
        seal(folder)

    return remove


SHARD = "rank-00001.safetensors"
LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard of another step": (
        take("rank-00001.safetensors", "../step-00000003/rank-00001.safetensors"),
        "is of step 3",
    ),
    "random states of another step": (take("rng-00000.json", "../step-00000003/rng-00000.json"), "is of step 3"),
    "a rank's shard twice": (take("rank-00001.safetensors", "rank-00000.safetensors"), "was written as rank-00000"),
    "a rank's random states twice": (take("rng-00001.json", "rng-00000.json"), "was written as rng-00000"),
    "a shard too few": (lose("rank-00001.safetensors"), "rank-00001.safetensors is missing"),
    "random states too few": (lose("rng-00000.json"), "rng-00000.json is missing"),
    "a shard too many": (take("rank-00002.safetensors", SHARD), "rank-00002.safetensors is of no rank"),
    "tokens that were not counted": (lambda folder: change_state(folder, num_tokens=10**6), "or these were changed"),
    "a format that is kept back": (strip_format, "or these were changed since"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_do_not_belong_together_are_named(lie: str, whole: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints"))
    newest = root / "step-00000009"
    names = list(listed_files(newest))
    assert foreign_file(newest, read_state(newest), names) == ""
    spoil, said = LIES[lie]
    spoil(newest)
    assert said in foreign_file(newest, read_state(newest), names)


def test_a_shard_that_nobody_listed_is_named(whole: Path, tmp_path: Path) -> None:
    newest = Path(shutil.copytree(checkpoints(whole / "checkpoints")[0], tmp_path / "step-00000009"))
    shutil.copy(newest / "rank-00001.safetensors", newest / "rank-00002.safetensors")
    assert foreign_file(newest, read_state(newest), []).startswith("rank-00002.safetensors is not among the files")


@pytest.mark.parametrize("changes", [{"epoch": 1}, {"step_of_epoch": 0}, {"epoch": 3, "step_of_epoch": 0}])
def test_a_place_that_contradicts_the_steps_of_an_epoch_is_named(
    changes: dict[str, int], whole: Path, tmp_path: Path
) -> None:
    newest = Path(shutil.copytree(checkpoints(whole / "checkpoints")[0], tmp_path / "step-00000009"))
    values = read_state(newest)
    state, epochs = values["state"], values["epochs"]
    assert state["step"] == (state["epoch"] - 1) * epochs["steps"] + state["step_of_epoch"]
    assert state["epoch"] == 2, "or the changes change nothing"
    change_state(newest, **changes)
    with pytest.raises(StateError, match=r"steps in an epoch, which cannot both be"):
        read_state(newest)


def test_epochs_of_another_number_of_steps_are_counted_from_where_they_began() -> None:
    """As after --resume_anyway with other data, and from a checkpoint of an earlier version."""
    first = epochs_of(None, 4)
    state = {"step": 10, "epoch": 3, "step_of_epoch": 2}
    assert epochs_of({"state": state, "epochs": first}, 4) == first == {"first": 1, "after_step": 0, "steps": 4}
    later = {"first": 3, "after_step": 8, "steps": 5}
    assert epochs_of({"state": state, "epochs": first}, 5) == epochs_of({"state": state}, 5) == later
    assert epochs_of({"state": state | {"step": 14, "epoch": 4, "step_of_epoch": 1}, "epochs": later}, 5) == later


@pytest.mark.parametrize("lie", ["a shard of another step", "a state that lies"])
def test_the_run_goes_on_from_the_checkpoint_before(
    lie: str, whole: Path, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    newest = checkpoints(run / "checkpoints")[0]
    shutil.rmtree(newest)
    newest = checkpoints(run / "checkpoints")[0]
    if lie == "a state that lies":
        state = read_state(newest)["state"]
        change_state(newest, epoch=state["epoch"] + 1, step_of_epoch=0)
    else:
        LIES[lie][0](newest)
    outcome = process_group.train(flags_of(tiny_model, run, *FLAGS, "--resume", "auto"), 2)[0]
    assert f"checkpoint: {newest} is damaged: " in outcome.stdout
    assert f"resume: from {run}/checkpoints/step-00000003, after step 3" in outcome.stdout
    assert_bit_equal(run, whole)


def test_weights_of_two_checkpoints_are_not_exported(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints"))
    LIES["a shard of another step"][0](root / "step-00000009")
    assert export.main([str(root / "step-00000009"), "--to", str(tmp_path / "exported")]) == 2
    assert f"is damaged: {SHARD} is of step 3, and state.json of step 9" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()
