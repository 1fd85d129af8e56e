"""Which checkpoint a run goes on from, and in which folder. Rank 0 looks: the others may be on another disk."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpointing.finding import Checkpoint, find_checkpoints, open_checkpoint, resolve_resume
from configs.run import RunConfig
from configs.training import TrainConfig
from ranks.environment import Environment
from ranks.meeting import Meeting
from resolving.killed import how_it_was_killed
from resolving.preflight import check_environment
from run_folder.path_checks import check_paths
from run_folder.run_folder import FolderStamps, checkpoint_root, folder_stamps, planned_folder

_SETTLED = ("resume", "overwrite", "output_dir")


@dataclass(frozen=True)
class ResumeState:
    """What a run finds in its folders before it reads anything else."""

    config: RunConfig  # with --resume and --output_dir settled
    folders: list[Path]  # the checkpoints to try, in this order; none if the run starts afresh
    checkpoint: Checkpoint | None  # the first whose small files are undamaged
    stamps: FolderStamps  # of the run's folders, on rank 0's machine


def look_into_folders(config: RunConfig, env: Environment, meeting: Meeting) -> ResumeState:
    """What rank 0 finds, on every rank. Writes nothing.

    Raises:
        ConfigError: on every rank, if rank 0 is refused its machine or the folders.
    """

    told = meeting.from_rank_zero("folders", lambda: look(config, env))
    train = replace(config.train_config, **told["train_config"])
    checkpoint = None if told["checkpoint"] is None else Checkpoint(Path(told["checkpoint"][0]), told["checkpoint"][1])
    begun = ResumeState(
        config=replace(config, train_config=train, notes=tuple(told["notes"])),
        folders=[Path(folder) for folder in told["folders"]],
        checkpoint=checkpoint,
        stamps=tuple(None if stamp is None else tuple(stamp) for stamp in told["stamps"]),
    )
    if not env.is_rank_zero:
        check_environment(begun.config, env)
    return begun


def look(config: RunConfig, env: Environment) -> dict[str, Any]:
    """What this process finds on its machine, in plain types. Writes nothing.

    Raises:
        ConfigError: if the run is refused the machine or the folders.
    """
    settled = resolve_resume(config, env)
    train, folder = settled.train_config, planned_folder(settled.train_config, env)
    check_environment(settled, env)
    check_paths(settled, folder, afresh=not train.resume)
    stamps = folder_stamps(train, env)
    folders = find_checkpoints(train, env)
    check_paths(settled, folder, afresh=not folders)
    checkpoint = open_checkpoint(folders, env, every_file=False)
    return {
        "train_config": {name: getattr(train, name) for name in _SETTLED},
        "notes": [*settled.notes, *_notes(train, folder, folders)],
        "stamps": stamps,
        "folders": [str(folder) for folder in folders],
        "checkpoint": None if checkpoint is None else [str(checkpoint.folder), checkpoint.values],
    }


def _notes(train: TrainConfig, folder: Path, folders: list[Path]) -> list[str]:
    """How the session before ended, if it could not say so itself; and a line for who expected to go on: on another
    machine there may be nothing."""
    notes = how_it_was_killed(folder) if train.resume else []
    if not train.resume or folders:
        return notes
    root = checkpoint_root(train, folder)
    return [*notes, f"resume: there is no checkpoint in {root} on {socket.gethostname()}; the run starts afresh"]
