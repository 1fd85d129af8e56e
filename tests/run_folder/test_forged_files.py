"""Files of a run folder that somebody else wrote: they are passed over, or refused in one line, without a wait."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat.template import use_template
from checkpointing.state_json import StateError, read_state
from configs.recipe_file import read_recipe
from configs.run import RunConfig
from configs.training import TrainConfig
from planning.machines.group_speeds import read_speeds
from ranks.environment import lone_process
from reporting.plan_figures import read_plan_figures
from reporting.report.run_files import read_run
from resolving.killed import how_it_was_killed
from resolving.resume_state import look
from run_folder.checkpoint_folder import checkpoints, damage
from run_folder.kernel_lock import is_locked
from run_folder.lock import RunLock, find_dead, holder_of
from run_folder.lock_owner import Owner, read_lock
from run_folder.run_yaml import first_date, read_run_yaml, resumes_in
from tools.answering.prompts import read_prompts
from tools.answering.trained_on import NOTHING_KNOWN
from utils.errors import ConfigError

BAD: list[Any] = [None, True, -1, 0, 1.5, float("inf"), 10**30, 10**400, "", "\ud800", [], [[1]], {}, {"a": {}}]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def nested(path: Path) -> None:
    path.write_text("[" * 20_000)


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


FORGED = [pipe, endless, folder, nested, noise]
Forge = Callable[[Path], None]


@pytest.mark.parametrize("name", [*Owner.__dataclass_fields__, "none"])
def test_a_lock_with_a_field_of_any_value_is_nobodys(name: str, tmp_path: Path) -> None:
    owner = Owner.of_this_process("token")
    for bad in BAD:
        (tmp_path / "lock.json").write_text(json.dumps(vars(owner) | {name: bad}))
        state = read_lock(tmp_path / "lock.json")
        assert state is not None
        if isinstance(bad, str) and bad == "" and name not in ("process", "process_start", "none"):
            assert state.owner is not None
            continue
        if name == "process_start" and bad == 1.5:
            assert state.owner is not None
            continue
        assert state.owner is None, (name, bad)
        assert holder_of(tmp_path) == "a run that has just begun", "it was written a moment ago"
        os.utime(tmp_path / "lock.json", (0, 0))
        assert holder_of(tmp_path) is None
        assert find_dead("--output_dir", tmp_path, stale_seconds=0.01) is not None


@pytest.mark.parametrize("forge", [pipe, endless, folder])
def test_a_lock_that_is_no_file_is_refused(forge: Forge, tmp_path: Path) -> None:
    forge(tmp_path / "lock.json")
    assert holder_of(tmp_path) is None
    for take in (lambda: find_dead("--output_dir", tmp_path), lambda: RunLock().take("--output_dir", tmp_path)):
        with pytest.raises(
            ConfigError, match=r"lock.json cannot be read \((not a regular file|Is a directory)\).*remove it"
        ):
            take()


@pytest.mark.parametrize("forge", FORGED)
def test_a_run_folder_of_forged_files_is_looked_at_and_reported(forge: Forge, tmp_path: Path) -> None:
    for name in ("run.yaml", "metrics.jsonl", "samples.jsonl", "plan.json", "oom.json", "lock.json"):
        run = tmp_path / name
        run.mkdir()
        forge(run / name)
        assert read_plan_figures(run) == {}
        assert how_it_was_killed(run) == []
        if name == "run.yaml" and forge in (nested, noise):
            assert read_run_yaml(run) == {}
        read_run(run)
        if name == "lock.json" and forge in (nested, noise):
            continue  # an owner that is being written is waited for
        with pytest.raises(ConfigError, match="--output_dir: ") as refused:
            look(RunConfig(TrainConfig("model", output_dir=str(run))), lone_process())
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("forge", FORGED)
def test_a_checkpoint_of_forged_files_is_damaged(forge: Forge, tmp_path: Path) -> None:
    for name in ("COMPLETE", "state.json"):
        checkpoint = tmp_path / name / "step-00000003"
        checkpoint.mkdir(parents=True)
        forge(checkpoint / name)
        if name == "COMPLETE":
            assert damage(checkpoint).startswith("COMPLETE cannot be read (")
        else:
            with pytest.raises(StateError, match=r"state\.json"):
                read_state(checkpoint)
            (checkpoint / "COMPLETE").write_text('{"files": {"state.json": {"bytes": 0, "crc32": "0"}}}')
            assert damage(checkpoint) != ""


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that started afresh would delete them."""
    checkpoint = tmp_path / "step-00000003"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").write_text("{}")
    assert checkpoints(tmp_path) == [checkpoint]
    assert checkpoints(tmp_path / "nowhere") == checkpoints(checkpoint / "COMPLETE") == []

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        assert checkpoints(tmp_path) == [checkpoint], "it is found damaged, or whole"
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(PermissionError):
        checkpoints(tmp_path)


@pytest.mark.parametrize("forge", FORGED)
def test_files_that_flags_name_are_refused_with_their_flag(forge: Forge, tmp_path: Path) -> None:
    place = tmp_path / "file"
    forge(place)
    with pytest.raises(ConfigError, match=r"^--config: "):
        read_recipe(str(place))
    with pytest.raises(ConfigError, match=r"^--network_speeds: "):
        read_speeds(place)
    if forge is not nested:  # any text is a template, or a prompt
        with pytest.raises(ConfigError, match=r"^--chat_dataset.chat_template: "):
            use_template(type("Tokenizer", (), {"chat_template": None})(), str(place))
        with pytest.raises(ConfigError, match=r"^--prompts: "):
            read_prompts(place, NOTHING_KNOWN.row_settings())


def test_entries_of_run_yaml_that_no_run_writes_are_left_out(tmp_path: Path) -> None:
    good = {"from": "elsewhere", "step": 3}
    for bad in ["5", "[5]", "{}", "[{}]", "[{from: 5}]", "null"]:
        (tmp_path / "run.yaml").write_text(f"resumed: {bad}\n")
        assert resumes_in(read_run_yaml(tmp_path)) == []
    assert resumes_in({"resumed": [3, good]}) == [good]
    for date, wanted in [("5", None), ("[1]", None), ("'2026-13-50'", None), ("'2026-11-26T01:02'", "2026-11-26")]:
        (tmp_path / "run.yaml").write_text(f"settings: {{train_config: {{template_date: {{}}}}}}\nstarted: {date}\n")
        assert first_date(tmp_path) == wanted


@pytest.mark.parametrize("again", ["another run", "nobody"])
def test_a_folder_that_was_deleted_and_is_back_is_held_again_on_a_local_disk(again: str, tmp_path: Path) -> None:
    said: list[str] = []
    run = tmp_path / "run"
    with RunLock(beat_seconds=3600, say=said.append, on_loss=said.append) as lock:
        lock.take("--output_dir", run)
        shutil.rmtree(run)
        lock.look_after(run / "lock.json")
        assert len(said) == 1
        assert not run.exists()
        run.mkdir()
        if again == "another run":
            other = RunLock()
            other.take("--output_dir", run)
            lock.look_after(run / "lock.json")
            assert "is in use by" in said[1]
            other.release()
            return
        lock.look_after(run / "lock.json")
        lock.look_after(run / "lock.json")
        assert is_locked(run / "lock.json")
        assert len(said) == 1
    assert not (run / "lock.json").exists()
