"""Questions about a path alone: which run it belongs to, where the run's checkpoints are, whether it still trains."""

from __future__ import annotations

from pathlib import Path

from run_folder.checkpoint_folder import BEST, COMPLETE, LATEST, is_step_folder, pointed_to
from run_folder.entries import CHECKPOINTS
from run_folder.lock import holder_of
from run_folder.run_yaml import NAME, read_run_yaml
from utils.errors import ConfigError


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a path is or lies in."""
    return next((folder for folder in (path.absolute(), *path.absolute().parents) if (folder / NAME).is_file()), None)


def checkpoint_root_of(run: Path) -> Path:
    """The folder of checkpoints of the run in this folder, by its run.yaml."""
    elsewhere = read_run_yaml(run).get("checkpoints") if (run / NAME).is_file() else None
    return Path(elsewhere) if isinstance(elsewhere, str) and "\0" not in elsewhere else run / CHECKPOINTS


def named_checkpoint(path: Path) -> Path:
    """The checkpoint that a path like checkpoints/latest or checkpoints/best names; any other path as it is."""
    if path.name not in (LATEST, BEST) or not path.is_file():
        return path
    name = pointed_to(path.parent, path.name)
    return path.with_name(name) if name and is_step_folder(Path(name)) else path


def holder_of_gone(path: Path) -> str | None:
    """The run that still writes where this checkpoint, run or folder of checkpoints was looked for.

    A run that still trains deletes older checkpoints as it writes new ones. None if the checkpoint is there, or no run
    is at work there.
    """
    if (path / COMPLETE).is_file():
        return None
    places = {path, path.parent, run_folder_of(path) or path}  # checkpoints may lie apart from their run
    return next(filter(None, map(holder_of, places)), None)


def refuse_if_gone(path: Path) -> None:
    """Refuse to resume from a checkpoint that its run has deleted, or may delete next.

    Raises:
        ConfigError: with the run that is at work there, and the remedy.
    """
    owner = holder_of_gone(path)
    if owner is None:
        return
    what = "holds no complete checkpoint" if path.is_dir() else "is not there"
    raise ConfigError(
        f"--resume: {path} {what} now: {owner} still goes on there, and deletes older checkpoints as it writes new "
        "ones; wait until it ends, stop it, or copy a checkpoint and give the copy"
    )
