"""run.yaml: writing, reading and adding to it."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypedDict

import yaml

from configs.run import RunConfig
from ranks.environment import Environment, launch_command
from utils.atomic_write import write_atomically
from utils.host_memory import read_host_memory
from utils.processes import machine
from utils.small_files import parse_yaml, read_text
from utils.software import git_commit, versions

NAME = "run.yaml"


def write_run_yaml(
    folder: Path,
    config: RunConfig,
    env: Environment,
    *,
    resolved: dict[str, Any],
    description: dict[str, dict[str, Any]],
    entries: list[str],
    checkpoints: Path | None,
    earlier: dict[str, Any],
) -> None:
    """Write every setting, given and resolved, and all else that a rerun would need.

    Args:
        description: sections on model, data and devices (`reporting.run_description`).
        entries: names of the run's entries in this folder, in all its sessions.
        checkpoints: their folder, unless it is in this one.
        earlier: values that stay from the run's earlier sessions.

    Raises:
        OSError: if the file cannot be written.
    """
    contents = {
        "settings": config.to_dict(),
        "given": sorted(config.given),
        "resolved": resolved,
        **description,
        "world_size": env.world_size,
        "local_world_size": env.local_world_size,
        "versions": versions(),
        "git_commit": git_commit(),
        "command": launch_command(env, sys.argv[1:]),
        "working_directory": str(env.started_in),
        "job": env.job,
        # If this session ends without a word, the next one tells by it whether the kernel has killed it for memory.
        "machine": machine(),
        "host_memory": asdict(read_host_memory()),
        "launcher": env.launcher,
        "entries": entries,
        # None if they are in this folder, which may be moved with them. Absolute, since the working directory changes.
        "checkpoints": None if checkpoints is None else str(checkpoints.absolute()),
        "started": now(),
        **earlier,
    }
    _write(folder, contents)


def add_to_run_yaml(folder: Path, **entries: Any) -> None:
    """Add entries that were only known later, such as the step whose weights were saved."""
    _write(folder, read_run_yaml(folder) | entries)


def restore_run_yaml(folder: Path, contents: dict[str, Any]) -> None:
    """Write run.yaml again, as it was last read, into a folder that was deleted since and is back."""
    _write(folder, contents)


def read_run_yaml(folder: Path) -> dict[str, Any]:
    """The contents of run.yaml. Empty if it is damaged, as after a power failure: no run needs it to go on.

    Raises:
        OSError: if it is not there, cannot be read, or is no regular file of a credible size.
    """
    try:
        values = _parsed(read_text(folder / NAME))
    except ValueError:
        return {}
    return copy.deepcopy(values) if isinstance(values, dict) else {}  # `_parsed` keeps its own


# libyaml takes 2 ms for what PyYAML's own parser takes 14 for; a PyYAML built without it has the other alone.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_NEVER_BROKEN = 2**31 - 1  # the width of a line that libyaml takes for no limit


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> Any:
    """YAML's values. Kept, since a run reads its file over ten times."""
    return parse_yaml(text, _LOADER)


class SavedEntry(TypedDict):
    """The entry of the saved weights."""

    step: int
    folder: str  # its name


def saved_in(values: Mapping[str, Any]) -> SavedEntry | None:
    """The entry of the saved weights; None if there is none that a run would write."""
    saved = values.get("saved")
    if isinstance(saved, dict) and type(saved.get("step")) is int and saved.get("folder") in ("model", "adapter"):
        return SavedEntry(step=saved["step"], folder=saved["folder"])
    return None


def resumes_in(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of the run's resumes, oldest first; those that no run would write are left out."""
    resumed = values.get("resumed")
    entries = resumed if isinstance(resumed, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("from"), str)]


def is_of_a_run(values: Mapping[str, Any]) -> bool:
    """Whether these are the contents of a run.yaml that this program wrote, and not of another's file of this name."""
    settings = values.get("settings")
    return isinstance(settings, dict) and isinstance(settings.get("train_config"), dict)


def is_cut(values: Mapping[str, Any]) -> bool:
    """Whether these are the contents of a run.yaml whose end is missing; what is left may be valid YAML."""
    return is_of_a_run(values) and "started" not in values


def is_damaged(folder: Path) -> bool:
    """Whether run.yaml is there and not whole, as after a power failure; another program's file can be read."""
    if not (folder / NAME).is_file():
        return False
    values = read_run_yaml(folder)
    return not values or is_cut(values)


def first_date(folder: Path | None) -> str | None:
    """The day that chat templates of the run in this folder take for today; None if there is no run."""
    values = read_run_yaml(folder) if folder is not None and (folder / NAME).is_file() else {}
    if not is_of_a_run(values):
        return None
    for day in (values["settings"]["train_config"].get("template_date"), values.get("started")):
        with contextlib.suppress(ValueError):
            return date.fromisoformat(str(day)[:10]).isoformat()
    return None


def now() -> str:
    """The time as run.yaml writes it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


class _RunDumper(_DUMPER):  # type: ignore[misc, valid-type]
    """Plain lists on one line, text line by line as a person would write it, and no line broken, for copying."""


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


def _write(folder: Path, contents: dict[str, Any]) -> None:
    text = yaml.dump(contents, Dumper=_RunDumper, sort_keys=False, allow_unicode=True, width=_NEVER_BROKEN)
    # Unless it is synced, a power failure may leave the folder's checkpoints and not this file.
    write_atomically(folder / NAME, text, sync=True)
