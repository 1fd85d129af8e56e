"""The folder of a run, and the checkpoint that it goes on from. Rank 0 looks: the others may be on another disk."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from checkpointing.finding import Checkpoint, open_checkpoint
from configs.run import RunConfig
from ranks.environment import Environment
from ranks.meeting import Meeting
from resolving.killed import how_it_was_killed
from resolving.preflight import check_environment
from run_folder.other_runs import run_folder_of
from run_folder.resuming import settle_resume
from run_folder.run_folder import RunFolder
from run_folder.run_yaml import first_date
from utils.errors import ConfigError

_SETTLED = ("resume", "overwrite", "output_dir", "template_date")


@dataclass(frozen=True)
class ResumeState:
    """The contents of a run's folders that decide where it goes on, read before anything else."""

    config: RunConfig  # with --resume and --output_dir settled
    folder: RunFolder
    checkpoint: Checkpoint | None  # the first whose small files are undamaged; None if the run starts afresh

    def to_dict(self) -> dict[str, Any]:
        """The values that other ranks cannot find out for themselves, in plain types."""
        return {
            "train_config": {name: getattr(self.config.train_config, name) for name in _SETTLED},
            "notes": list(self.config.notes),
            "stamps": self.folder.stamps,
            "checkpoints": [str(path) for path in self.folder.checkpoints],
            "checkpoint": None if self.checkpoint is None else [str(self.checkpoint.folder), self.checkpoint.values],
        }

    @classmethod
    def of(cls, told: dict[str, Any], config: RunConfig, env: Environment) -> ResumeState:
        """From `to_dict` of rank 0, and this rank's own settings."""
        train = replace(config.train_config, **told["train_config"])
        config = replace(config, train_config=train, notes=tuple(told["notes"]))
        folder = replace(
            RunFolder.plan(config, env),
            checkpoints=tuple(map(Path, told["checkpoints"])),
            stamps=tuple(None if stamp is None else tuple(stamp) for stamp in told["stamps"]),
        )
        checkpoint = None
        if told["checkpoint"] is not None:
            path, values = told["checkpoint"]
            checkpoint = Checkpoint(Path(path), values)
        return cls(config, folder, checkpoint)


def find_resume_state(config: RunConfig, env: Environment, meeting: Meeting) -> ResumeState:
    """Rank 0's findings, on every rank. Writes nothing.

    Raises:
        ConfigError: on every rank, if rank 0 is refused its machine or the folders.
    """
    # docs/decisions.md, "Rank 0 alone looks into the run's folders".
    told = meeting.from_rank_zero("folders", lambda: look(config, env).to_dict())
    found = ResumeState.of(told, config, env)
    if not env.is_rank_zero:  # rank 0 has done so in `look`
        check_environment(config, env)
        found.folder.check_usable(is_rank_zero=False)
    return found


def look(config: RunConfig, env: Environment) -> ResumeState:
    """This process's findings on its machine. Writes nothing.

    Raises:
        ConfigError: if the run is refused the machine or the folders.
    """
    try:
        return _look(config, env)
    except OSError as error:  # a file server that fails, or a pipe in a file's place
        place = error.filename or config.train_config.output_dir or "the run's folder"
        raise ConfigError(
            f"--output_dir: {place} cannot be read ({error.strerror or error}); mend it, or give another folder"
        ) from error


def _look(config: RunConfig, env: Environment) -> ResumeState:
    config = settle_resume(config, env)
    check_environment(config, env)
    folder = RunFolder.plan(config, env)
    folder.check_usable(is_rank_zero=True)
    folder = folder.look()
    checkpoint = open_checkpoint(folder.checkpoints, env, every_file=False)
    train = replace(config.train_config, template_date=_template_date(config, folder, checkpoint))
    config = replace(config, train_config=train, notes=(*config.notes, *_notes(folder)))
    return ResumeState(config, folder, checkpoint)


def _template_date(config: RunConfig, folder: RunFolder, checkpoint: Checkpoint | None) -> str:
    """The day that chat templates take for today: that of the run's first start, so that its tokens stay the same.

    Runs of earlier versions have noted in run.yaml alone when they started.
    """
    given = config.train_config.template_date
    if given is not None or folder.resume is None:
        return given or date.today().isoformat()
    there = None if checkpoint is None else checkpoint.values["settings"]["train_config"].get("template_date")
    run = folder.path if checkpoint is None else run_folder_of(checkpoint.folder)
    return there or first_date(run) or date.today().isoformat()


def _notes(folder: RunFolder) -> list[str]:
    """How the session before ended, if it could not say so itself; and a line if there is nothing to resume from.

    The checkpoints may be on another machine.
    """
    if folder.resume is None:
        return []
    notes = how_it_was_killed(folder.path)
    if folder.checkpoints:
        return notes
    return [
        *notes,
        f"resume: there is no checkpoint in {folder.checkpoint_root} on {socket.gethostname()}; the run starts afresh",
    ]
