"""The run folder: where a run writes, and what it must not write over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from configs.tracking import TrackingConfig
from configs.training import TrainConfig
from reporting.default_folders import OUTPUTS, make_default_folder
from reporting.run_lock import RunLock, find_dead
from reporting.run_yaml import read_run_yaml, write_run_yaml
from reporting.trackers import WANDB_RUN
from utils.environment import Environment
from utils.errors import ConfigError

RUN_ENTRIES = (
    "run.yaml",
    "metrics.jsonl",
    "metrics_data.json",
    "model",
    "adapter",
    "checkpoints",
    "tensorboard",
    "traces",
    "wandb",
    "profiler",
    "report.html",
)


def check_run_folder(train: TrainConfig, tracking: TrackingConfig, env: Environment) -> None:
    """Refuse a folder that cannot be written, is in use, or already holds a run. Writes nothing.

    Raises:
        ConfigError: with the remedy.
    """
    # What held the folder before a restart has died with the job. Ranks of other machines cannot see that; rank 0 can.
    checks_lock = env.is_rank_zero or not env.restarted
    folder = Path(train.output_dir).expanduser() if train.output_dir else OUTPUTS
    _check_writable("--output_dir", folder)
    if train.dist_checkpoint_root_folder:
        _check_writable("--dist_checkpoint_root_folder", Path(train.dist_checkpoint_root_folder))
        root = checkpoint_root(train, folder)
        if checks_lock:
            find_dead("--dist_checkpoint_folder", root)
        is_held = any(path.exists() for path in (root / "COMPLETE", *root.glob("step-*/COMPLETE")))
        if is_held and not train.overwrite and not train.resume:
            raise ConfigError(
                f"--dist_checkpoint_folder: {root} already holds a checkpoint; give another folder, or --overwrite"
            )
    if tracking.profiler_dir:
        _check_writable("--profiler_dir", Path(tracking.profiler_dir).expanduser())
    if not train.output_dir:
        return
    if checks_lock:
        find_dead("--output_dir", folder)
    if not train.overwrite and not train.resume and (held := held_entries(folder)):
        raise ConfigError(
            f"--output_dir: {folder} already holds a run ({', '.join(held)}); "
            "give another folder, --resume auto to go on with it, or --overwrite to replace it"
        )


def check_unfinished(train: TrainConfig) -> None:
    """Refuse to train a finished run again if --resume auto finds no checkpoint.

    Raises:
        ConfigError: with the remedy.
    """
    folder = Path(train.output_dir or "").expanduser()
    metrics = folder / "metrics.jsonl"
    if train.output_dir and metrics.is_file() and b'"status": "finished"' in metrics.read_bytes()[-4096:]:
        raise ConfigError(
            f"--resume: {folder} holds a finished run without checkpoints, so there is nothing to go on from; "
            "--overwrite trains it anew"
        )


def held_entries(folder: Path) -> list[str]:
    """The names of what an earlier run left in the folder."""
    return [entry for entry in RUN_ENTRIES if (folder / entry).exists()]


def checkpoint_root(train: TrainConfig, folder: Path) -> Path:
    """Where a run with this folder has its checkpoints."""
    if train.dist_checkpoint_root_folder:
        return Path(train.dist_checkpoint_root_folder).expanduser() / train.dist_checkpoint_folder
    return folder / "checkpoints"


def checkpoint_root_of(run: Path) -> Path:
    """Where the run in this folder has, or had, its checkpoints, by its run.yaml."""
    elsewhere = read_run_yaml(run).get("checkpoints") if (run / "run.yaml").is_file() else None
    return Path(elsewhere) if elsewhere else run / "checkpoints"


def _check_writable(flag: str, folder: Path) -> None:
    """Refuse a folder that could not be made or written, by the nearest one above it that exists."""
    existing = folder
    while not existing.exists():
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
    resolved: dict[str, Any],
    description: dict[str, dict[str, Any]],
    resumed: dict[str, Any] | None = None,
) -> Path:
    """Make the folder and its run.yaml, or go on with those that are there. Call this on rank 0 alone.

    Entries of an earlier run are deleted, as --overwrite asks. If --resume auto found no checkpoint, saved weights stay
    until new ones replace them.

    Args:
        lock: is taken before anything is deleted or written.
        resolved: what the settings came to on this machine.
        description: what else run.yaml shows, by section.
        resumed: what run.yaml tells of the resume; None if the run starts afresh.

    Raises:
        ConfigError: if another run uses the folder, or the file system refuses.
    """
    train = config.train_config
    folder = Path(train.output_dir).expanduser() if train.output_dir else OUTPUTS
    try:
        folder = folder if train.output_dir else make_default_folder(train)
        root = checkpoint_root(train, folder)
        lock.take("--output_dir", folder)
        if root.parent != folder:
            lock.take("--dist_checkpoint_folder", root)
        earlier: dict[str, Any] = {}
        if resumed is None:
            _delete_checkpoints(root)
            _delete_entries(folder, kept=() if train.overwrite else ("model", "adapter"))
        else:
            before = read_run_yaml(folder) if (folder / "run.yaml").is_file() else {}
            earlier = {name: before[name] for name in ("saved", "started", WANDB_RUN) if name in before}
            earlier["resumed"] = [*before.get("resumed", []), resumed]
        write_run_yaml(
            folder,
            config,
            env,
            resolved=resolved,
            description=description,
            checkpoints=None if root.parent == folder else root,
            earlier=earlier,
        )
    except OSError as error:
        raise ConfigError(f"--output_dir: {folder} cannot be written ({error}); give a folder that can") from error
    return folder


def _delete_entries(folder: Path, *, kept: tuple[str, ...]) -> None:
    for entry in RUN_ENTRIES:
        path = folder / entry
        if path.is_dir() and entry not in kept:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def _delete_checkpoints(root: Path) -> None:
    """Those of an earlier run: the first restart of this one would resume from them."""
    for path in root.glob("step-*"):
        shutil.rmtree(path)
    for name in ("latest", "best"):
        (root / name).unlink(missing_ok=True)
