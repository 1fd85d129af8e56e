"""The run folder: where a run writes, and what it must not write over."""

from __future__ import annotations

import glob
import math
import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from configs.run import RunConfig
from utils.environment import Environment, launch_command
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


def check_run_folder(config: RunConfig) -> None:
    """Refuse a folder that cannot be written or already holds a run. Writes nothing.

    Raises:
        ConfigError: with the remedy.
    """
    train = config.train_config
    folder = Path(train.output_dir).expanduser() if train.output_dir else Path("outputs")
    _check_writable("--output_dir", folder)
    if train.dist_checkpoint_root_folder:
        _check_writable("--dist_checkpoint_root_folder", Path(train.dist_checkpoint_root_folder))
        copy = checkpoint_root(config, folder)
        is_held = any(path.exists() for path in (copy / "COMPLETE", *copy.glob("step-*/COMPLETE")))
        if is_held and not train.overwrite and not train.resume:
            raise ConfigError(
                f"--dist_checkpoint_folder: {copy} already holds a checkpoint; give another folder, or --overwrite"
            )
    if config.tracking_config.profiler_dir:
        _check_writable("--profiler_dir", Path(config.tracking_config.profiler_dir).expanduser())
    if train.output_dir and not train.overwrite and not train.resume and (held := held_entries(folder)):
        raise ConfigError(
            f"--output_dir: {folder} already holds a run ({', '.join(held)}); "
            "give another folder, --resume auto to go on with it, or --overwrite to replace it"
        )


def check_unfinished(config: RunConfig) -> None:
    """Refuse to start a finished run again because --resume auto finds nothing to go on from.

    Raises:
        ConfigError: with the remedy.
    """
    folder = Path(config.train_config.output_dir or "").expanduser()
    metrics = folder / "metrics.jsonl"
    if config.train_config.output_dir and metrics.is_file() and b'"status": "finished"' in metrics.read_bytes()[-4096:]:
        raise ConfigError(
            f"--resume: {folder} holds a finished run without checkpoints, so there is nothing to go on from; "
            "--overwrite trains it anew"
        )


def held_entries(folder: Path) -> list[str]:
    """What lies there of an earlier run."""
    return [entry for entry in RUN_ENTRIES if (folder / entry).exists()]


def checkpoint_root(config: RunConfig, folder: Path) -> Path:
    """Where a run with this folder has its checkpoints."""
    train = config.train_config
    if train.dist_checkpoint_root_folder:
        return Path(train.dist_checkpoint_root_folder).expanduser() / train.dist_checkpoint_folder
    return folder / "checkpoints"


def checkpoint_root_of(run: Path) -> Path:
    """Where the run in this folder has, or had, its checkpoints, by its run.yaml."""
    elsewhere = read_run_yaml(run).get("checkpoints") if (run / "run.yaml").is_file() else None
    return Path(elsewhere) if elsewhere else run / "checkpoints"


def latest_run_folder(config: RunConfig) -> Path | None:
    """The newest of the folders that runs of this model and dataset got without --output_dir."""
    return next(iter(_default_folders(config)), None)


def folder_of_job(config: RunConfig, env: Environment) -> Path | None:
    """The run folder that this job wrote before its launcher restarted it."""
    given = config.train_config.output_dir
    folders = _default_folders(config) if given is None else [Path(given).expanduser()]
    return next((folder for folder in folders if _is_of_job(folder, env)), None)


def _is_of_job(folder: Path, env: Environment) -> bool:
    """By the job's name, and, since torchrun calls every job "none" that is given none, by the time on one machine."""
    if not (folder / "run.yaml").is_file():
        return False
    run = read_run_yaml(folder)
    if "started" not in run or run.get("job") != env.job:
        return False
    began = run["resumed"][-1]["time"] if "resumed" in run else run["started"]
    return datetime.fromisoformat(str(began)).timestamp() >= int(env.launched_at)


def _default_folders(config: RunConfig) -> list[Path]:
    """Those that runs of this model and dataset got without --output_dir, newest first."""
    name = _default_folder(config).name.rsplit("-", 2)[0]
    found = Path("outputs").glob(f"{glob.escape(name)}-????????-??????/run.yaml")
    return sorted((path.parent for path in found), reverse=True)


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
    resolved: dict[str, Any],
    facts: dict[str, dict[str, Any]],
    resumed: dict[str, Any] | None = None,
) -> Path:
    """Make the folder with its run.yaml, or go on with the one that is there.

    Entries of an earlier run go where `--overwrite` says so. Where `--resume auto` found no checkpoint to go on from,
    saved weights stay until they are replaced.

    Args:
        resolved: what the settings came to on this machine. facts: what else run.yaml shows, by section.
        resumed: what run.yaml tells of the resume; unset: the run starts afresh.

    Raises:
        ConfigError: where the file system refuses.
    """
    train = config.train_config
    folder = Path(train.output_dir).expanduser() if train.output_dir else _default_folder(config)
    earlier: dict[str, Any] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed is not None and (folder / "run.yaml").is_file():
            before = read_run_yaml(folder)
            earlier = {name: before[name] for name in ("saved", "started") if name in before}
            earlier["resumed"] = [*before.get("resumed", []), resumed]
        elif resumed is not None:
            earlier["resumed"] = [resumed]
        else:
            _forget_checkpoints(checkpoint_root(config, folder))
            kept = () if train.overwrite else ("model", "adapter")
            for entry in RUN_ENTRIES:
                path = folder / entry
                if path.is_dir() and entry not in kept:
                    shutil.rmtree(path)
                elif path.is_file():
                    path.unlink()
        _write_run_yaml(folder, config, env, resolved, facts, earlier)
    except OSError as error:
        raise ConfigError(f"--output_dir: {folder} cannot be written ({error}); give a folder that can") from error
    return folder


def _forget_checkpoints(root: Path) -> None:
    """Those of an earlier run, which the first restart of this one would go on from."""
    for path in root.glob("step-*"):
        shutil.rmtree(path)
    for name in ("latest", "best"):
        (root / name).unlink(missing_ok=True)


def _default_folder(config: RunConfig) -> Path:
    """`outputs/MODEL-DATASET-TIME`."""
    model = Path(config.train_config.model_name.rstrip("/")).name
    dataset = "-".join(name.removesuffix("_dataset") for name in config.train_config.datasets)
    return Path("outputs") / f"{model}-{dataset}-{datetime.now():%Y%m%d-%H%M%S}"


def _write_run_yaml(
    folder: Path,
    config: RunConfig,
    env: Environment,
    resolved: dict[str, Any],
    facts: dict[str, dict[str, Any]],
    earlier: dict[str, Any],
) -> None:
    """Every setting, what it came to on this machine, and what a rerun would need to know."""
    packages = ("torch", "transformers", "peft", "datasets", "accelerate", "tokenizers", "safetensors")
    contents = {
        "settings": config.to_dict(),
        "given": sorted(config.given),
        "resolved": resolved,
        **facts,
        "world_size": env.world_size,
        "local_world_size": env.local_world_size,
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        "git_commit": _git_commit(),
        "command": launch_command(env, Path(sys.argv[0]).name, sys.argv[1:]),
        "job": env.job,
        # Only where they are not in this folder, which may be moved with them; absolute, since nobody stays where a run
        # was started.
        "checkpoints": str(root.absolute()) if (root := checkpoint_root(config, folder)).parent != folder else None,
        "started": now(),
        **earlier,
    }
    _write_atomically(folder / "run.yaml", contents)


def now() -> str:
    """The time as run.yaml writes it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def add_to_run_yaml(folder: Path, **entries: Any) -> None:
    """Note something that was only known later, such as the step whose weights were saved."""
    _write_atomically(folder / "run.yaml", read_run_yaml(folder) | entries)


def read_run_yaml(folder: Path) -> dict[str, Any]:
    """What is in run.yaml; nothing where it is damaged, as by a machine that went down: no run needs it to go on."""
    try:
        values = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


class _RunDumper(yaml.SafeDumper):
    """Plain lists on one line, texts line by line, as a person would write them; lines unbroken, for copying."""


_RunDumper.add_representer(
    list,
    lambda dumper, values: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", values, flow_style=not any(isinstance(value, dict | list) for value in values)
    ),
)


_RunDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _write_atomically(path: Path, contents: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    text = yaml.dump(contents, Dumper=_RunDumper, sort_keys=False, allow_unicode=True, width=math.inf)
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _git_commit() -> str | None:
    """The commit of this code, marked where files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
