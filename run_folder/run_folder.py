"""The run folder: where a run writes, and what it must not write over.

Files of others may lie there, too. run.yaml says which entries are a run's: nothing else is deleted or replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from configs.training import TrainConfig
from ranks.environment import Environment
from run_folder.default_folders import make_default_folder, model_title, outputs
from run_folder.entries import (
    CHECKPOINTS,
    OOM,
    REPLACED,
    RUN_ENTRIES,
    WANDB_RUN,
    entries_of,
    held_entries,
    made_entries,
)
from run_folder.lock import RunLock, find_dead
from run_folder.run_yaml import NAME, is_damaged, read_run_yaml, write_run_yaml
from utils.atomic_write import FileWriteError
from utils.errors import ConfigError


def check_free(config: RunConfig, env: Environment) -> None:
    """Refuse folders that cannot be written or are in use by another run. Writes nothing.

    Raises:
        ConfigError: with the remedy.
    """
    train, tracking = config.train_config, config.tracking_config
    folder = planned_folder(train, env)
    places = [("--output_dir", folder)]
    if train.dist_checkpoint_root_folder:
        places.append(("--dist_checkpoint_root_folder", Path(train.dist_checkpoint_root_folder)))
        places.append(("--dist_checkpoint_folder", checkpoint_root(train, folder)))
    else:
        places.append(("--output_dir", checkpoint_root(train, folder)))
    if tracking.profiler_dir:
        places.append(("--profiler_dir", Path(tracking.profiler_dir)))
    for flag, place in places:
        _check_writable(flag, place)
    # What held a folder before a restart has died with the job. Ranks of other machines cannot see that; rank 0 can.
    if env.is_rank_zero or not env.restarted:
        for flag, place in places:
            if flag == "--dist_checkpoint_folder" or (place == folder and train.output_dir):
                find_dead(flag, place)


def check_entries(config: RunConfig, folder: Path, *, afresh: bool) -> None:
    """Refuse a folder in which the run would delete or replace what no run wrote. Writes nothing.

    Args:
        afresh: whether what an earlier run left will be deleted.

    Raises:
        ConfigError: with the remedy.
    """
    train = config.train_config
    held, damaged = held_entries(folder), is_damaged(folder)
    if not held:
        return
    made, written = made_entries(folder), entries_of(config.to_dict())
    names = ", ".join(held)
    if not made and not damaged:
        complete = max(folder.glob(f"{CHECKPOINTS}/step-*/COMPLETE"), default=None)
        goes_on = f" (with --resume {complete.parent} to go on from there)" if complete else ""
        raise ConfigError(
            f"--output_dir: {folder} holds {names}, but no run (no {NAME} of one), so nothing there is touched; give "
            f"another folder{goes_on}, or move that away"
        )
    if not train.overwrite and not train.resume:
        raise ConfigError(
            f"--output_dir: {folder} already holds a run ({names}); "
            "give another folder, --resume auto to go on with it, or --overwrite to replace it"
        )
    if damaged and afresh:
        raise ConfigError(
            f"--output_dir: {folder / NAME} is damaged and does not tell what the run there wrote ({names}), so "
            "nothing of it is deleted; give another folder, or move that away"
        )
    made = made or written  # a damaged run.yaml beside checkpoints: they belong together
    if foreign := [name for name in written if name in held and name not in made]:
        raise ConfigError(
            f"--output_dir: {folder} holds {', '.join(foreign)}, which the run there did not write and this one would "
            "replace; give another folder, or move that away"
        )
    gone = {*made, *written} - {CHECKPOINTS} if afresh else {*written}.intersection(REPLACED)
    if links := [name for name in held if name in gone and (folder / name).is_symlink()]:
        raise ConfigError(
            f"--output_dir: {', '.join(links)} in {folder} is a symbolic link, which no run makes and this one would "
            "replace; give another folder, or remove the link"
        )


def check_can_begin(train: TrainConfig) -> None:
    """Refuse to train a finished run again if --resume auto finds no checkpoint.

    Raises:
        ConfigError: with the remedy.
    """
    folder = Path(train.output_dir or "")
    metrics = folder / "metrics.jsonl"
    if train.output_dir and metrics.is_file() and b'"status": "finished"' in metrics.read_bytes()[-4096:]:
        raise ConfigError(
            f"--resume: {folder} holds a finished run without checkpoints, so there is nothing to go on from; "
            "--overwrite trains it anew"
        )


def planned_folder(train: TrainConfig, env: Environment) -> Path:
    """The run's folder; if it was not given, one that stands for it: the default folder has a new name."""
    return Path(train.output_dir) if train.output_dir else outputs(env) / "MODEL-DATASET-TIME"


def checkpoint_root(train: TrainConfig, folder: Path) -> Path:
    """Where a run with this folder has its checkpoints. Elsewhere with the model's name, as llama-recipes does."""
    if train.dist_checkpoint_root_folder:
        return Path(train.dist_checkpoint_root_folder, f"{train.dist_checkpoint_folder}-{model_title(train)}")
    return folder / CHECKPOINTS


def checkpoint_root_of(run: Path) -> Path:
    """Where the run in this folder has, or had, its checkpoints, by its run.yaml."""
    elsewhere = read_run_yaml(run).get("checkpoints") if (run / NAME).is_file() else None
    return Path(elsewhere) if isinstance(elsewhere, str) else run / CHECKPOINTS


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a path is or lies in."""
    return next((folder for folder in (path.absolute(), *path.absolute().parents) if (folder / NAME).is_file()), None)


FolderStamps = tuple[tuple[int, int, int] | None, ...]


def folder_stamps(train: TrainConfig, env: Environment) -> FolderStamps:
    """What changes if a run begins in the folders of this one, or writes a checkpoint there."""
    folder = planned_folder(train, env)
    return tuple(_mark(file) for file in (folder / NAME, checkpoint_root(train, folder) / "latest"))


def _mark(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _check_writable(flag: str, folder: Path) -> None:
    """Refuse a folder that could not be made or written, by the nearest one above it that exists."""
    existing = folder
    while not existing.exists():
        if existing.is_symlink():
            target = existing.parent / existing.readlink()
            raise ConfigError(
                f"{flag}: {existing} is a symbolic link to {target}, which is not there; make that folder, or give "
                "another one"
            )
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{flag}: {existing} is a file, not a folder; give another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {existing} cannot be written; give a folder that can")


def create_run_folder(
    config: RunConfig,
    env: Environment,
    lock: RunLock,
    *,
    check: Callable[[Path], None],
    delete_checkpoints: Callable[[Path], None],
    resolved: dict[str, Any],
    description: dict[str, dict[str, Any]],
    resumed: dict[str, Any] | None = None,
) -> Path:
    """Make the folder and its run.yaml, or go on with those that are there. Call this on rank 0 alone.

    What an earlier run wrote is deleted, as --overwrite asks. If --resume auto found no checkpoint, saved weights stay
    until new ones replace them.

    Args:
        lock: is taken before anything is checked, deleted or written.
        check: refuses the folder, once it is held.
        delete_checkpoints: deletes those of an earlier run in the folder.
        resolved: what the settings came to on this machine.
        description: what else run.yaml shows, by section.
        resumed: what run.yaml tells of the resume; None if the run starts afresh.

    Raises:
        ConfigError: if another run uses the folder, or the file system refuses.
    """
    train = config.train_config
    folder = planned_folder(train, env)
    try:
        folder = folder if train.output_dir else make_default_folder(train, outputs(env))
        root = checkpoint_root(train, folder)
        lock.take("--output_dir", folder)
        if root.parent != folder:
            lock.take("--dist_checkpoint_folder", root)
        check(folder)
        made = made_entries(folder)
        earlier: dict[str, Any] = {}
        if resumed is None:
            delete_checkpoints(folder)
            _delete_entries(folder, made, kept=() if train.overwrite else ("model", "adapter"))
        else:
            before = read_run_yaml(folder) if (folder / NAME).is_file() else {}
            earlier = {name: before[name] for name in ("saved", "started", WANDB_RUN) if name in before}
            earlier["resumed"] = [*before.get("resumed", []), resumed]
            (folder / OOM).unlink(missing_ok=True)
        held, written = held_entries(folder), entries_of(config.to_dict())
        write_run_yaml(
            folder,
            config,
            env,
            resolved=resolved,
            description=description,
            entries=[name for name in RUN_ENTRIES if name in written or (name in made and name in held)],
            checkpoints=None if root.parent == folder else root,
            earlier=earlier,
        )
    except FileWriteError as error:
        raise ConfigError(
            f"--output_dir: {error.filename} cannot be written ({error.strerror}); give a folder that can"
        ) from error
    except OSError as error:
        raise ConfigError(f"--output_dir: {folder} cannot be written ({error}); give a folder that can") from error
    return folder


def _delete_entries(folder: Path, made: list[str], *, kept: tuple[str, ...]) -> None:
    """Delete what an earlier run wrote. run.yaml says what that is, so it stays until the new one replaces it."""
    for name in made:
        path = folder / name
        if name in (NAME, CHECKPOINTS, *kept):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
