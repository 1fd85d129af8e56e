"""The folders of runs that are not given one: `outputs/MODEL-DATASET-TIME`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path

from ranks.environment import Environment
from run_folder.run_yaml import NAME, read_run_yaml

PLACEHOLDER = "MODEL-DATASET-TIME"  # until a default folder is made
_NAME_BYTES = 200  # of a folder's name, which may have 255, the time included


def outputs(env: Environment) -> Path:
    """The folder that default folders are made in."""
    return env.started_in / "outputs"


def model_title(model_name: str) -> str:
    """The last part of the model's folder or hub name."""
    return _shortened(Path(model_name.rstrip("/")).name)


def default_name(model_name: str, datasets: Sequence[str]) -> str:
    """MODEL-DATASET, the name of a run's default folder without the time."""
    return _shortened(f"{model_title(model_name)}-{'-'.join(name.removesuffix('_dataset') for name in datasets)}")


def _shortened(name: str) -> str:
    return os.fsencode(name)[:_NAME_BYTES].decode(errors="ignore")  # it may be cut within a character


def make_default_folder(inside: Path, name: str) -> Path:
    """Make a folder that no other run has. If two begin in the same second, the second one's name ends in -2.

    Raises:
        OSError: if it cannot be made.
    """
    inside.mkdir(exist_ok=True)
    for folder in _numbered(inside / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"):
        # mkdir itself decides whose the folder is: a look before it would miss a run that begins meanwhile.
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise AssertionError("names do not end")


def _numbered(first: Path) -> Iterator[Path]:
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def default_folders(inside: Path, name: str) -> list[Path]:
    """The default folders of this name that hold a run, newest first."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?")
    matches = [(pattern.fullmatch(path.parent.name), path.parent) for path in inside.glob(f"*/{NAME}")]
    found = [(match[1], int(match[2] or 1), folder) for match, folder in matches if match]
    return [folder for *_, folder in sorted(found, reverse=True)]


def is_of_job(folder: Path, env: Environment) -> bool:
    """Match by job id. torchrun's default id is "none", so on one machine match by torchrun's process as well."""
    if not (folder / NAME).is_file():
        return False
    run = read_run_yaml(folder)
    if "started" not in run or run.get("job") != env.job:
        return False
    if env.launcher is None:
        return True
    return run["launcher"] == env.launcher if run.get("launcher") else env.job != "none"
