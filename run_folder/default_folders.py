"""The folders of runs that are not given one: `outputs/MODEL-DATASET-TIME`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

from configs.training import TrainConfig
from ranks.environment import Environment
from run_folder.run_yaml import read_run_yaml

_NAME_BYTES = 200  # of a folder's name, which may have 255, with the time behind it


def outputs(env: Environment) -> Path:
    """The folder that default folders are made in."""
    return env.started_in / "outputs"


def make_default_folder(train: TrainConfig, inside: Path) -> Path:
    """Make a folder that no other run has. One that begins in the same second has -2 at the end of its name.

    Raises:
        OSError: if it cannot be made.
    """
    inside.mkdir(exist_ok=True)
    for folder in _names(inside / f"{_model_and_dataset(train)}-{datetime.now():%Y%m%d-%H%M%S}"):
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise AssertionError("names do not end")


def _names(first: Path) -> Iterator[Path]:
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def model_title(train: TrainConfig) -> str:
    """The last part of the model's folder or hub name."""
    return os.fsencode(Path(train.model_name.rstrip("/")).name)[:_NAME_BYTES].decode(errors="ignore")


def _model_and_dataset(train: TrainConfig) -> str:
    name = f"{model_title(train)}-{'-'.join(name.removesuffix('_dataset') for name in train.datasets)}"
    return os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")


def latest_run_folder(train: TrainConfig, inside: Path) -> Path | None:
    """The newest default folder of this model and dataset."""
    return next(iter(_default_folders(train, inside)), None)


def folder_of_job(train: TrainConfig, env: Environment) -> Path | None:
    """The run folder that this job wrote before its launcher restarted it."""
    folders = _default_folders(train, outputs(env)) if train.output_dir is None else [Path(train.output_dir)]
    return next((folder for folder in folders if _is_of_job(folder, env)), None)


def _default_folders(train: TrainConfig, inside: Path) -> list[Path]:
    """Those of this model and dataset that hold a run, newest first."""
    pattern = re.compile(rf"{re.escape(_model_and_dataset(train))}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    matches = [(pattern.fullmatch(path.parent.name), path.parent) for path in inside.glob("*/run.yaml")]
    found = [(match[1], int(match[2] or 1), folder) for match, folder in matches if match]
    return [folder for *_, folder in sorted(found, reverse=True)]


def _is_of_job(folder: Path, env: Environment) -> bool:
    """Match by job id. torchrun's default id is "none", so if it runs on one machine, match by its process as well."""
    if not (folder / "run.yaml").is_file():
        return False
    run = read_run_yaml(folder)
    if "started" not in run or run.get("job") != env.job:
        return False
    if env.launcher is None:
        return True
    return run["launcher"] == env.launcher if run.get("launcher") else env.job != "none"
