"""A checkpoint that is not there because its run still trains, and deletes older ones as it writes new ones."""

from __future__ import annotations

from pathlib import Path

from run_folder.checkpoint_folder import COMPLETE
from run_folder.lock import holder_of
from run_folder.run_folder import run_folder_of
from utils.errors import ConfigError


def holder_of_gone(path: Path) -> str | None:
    """The run that still writes where this checkpoint, run or folder of checkpoints was looked for.

    None if the checkpoint is there, or no run is at work there.
    """
    if (path / COMPLETE).is_file():
        return None
    places = {path, path.parent, run_folder_of(path) or path}  # checkpoints may lie apart from their run
    return next(filter(None, map(holder_of, places)), None)


def refuse_if_gone(path: Path) -> None:
    """Refuse to resume from such a checkpoint.

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
