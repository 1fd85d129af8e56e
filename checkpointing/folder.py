"""The folder of a checkpoint: written aside, complete or not there at all, checked before it is read.

    checkpoints/step-00000020/   COMPLETE, written last, lists every file with its size and checksum
    checkpoints/latest           names the newest complete one
    checkpoints/best             names that of the best evaluation (--keep_best)

What is written goes to `step-00000020.incomplete`, which gets its name when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

COMPLETE, LATEST, BEST, STATE = "COMPLETE", "latest", "best", "state.json"
_INCOMPLETE, _GIVEN_UP = ".incomplete", ".given-up"
_STEP = re.compile(r"step-(\d{8,})")

FileFacts = dict[str, Any]  # {"bytes": int, "crc32": "8 hex digits"}


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def temporary_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder.with_name(folder.name + _INCOMPLETE)


def is_step_folder(folder: Path) -> bool:
    """By its name; it need not be complete."""
    return _STEP.fullmatch(folder.name) is not None


def step_of(folder: Path) -> int:
    """The step in the folder's name."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named like a checkpoint")
    return int(match.group(1))


def checkpoints(root: Path) -> list[Path]:
    """Those that say they are complete, newest first."""
    folders = [path.parent for path in root.glob(f"step-*/{COMPLETE}") if _STEP.fullmatch(path.parent.name)]
    return sorted(folders, key=step_of, reverse=True)


def write_synced(path: Path, data: bytes) -> FileFacts:
    """Write a file that is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}


def sync_folder(folder: Path) -> None:
    """Have the folder's entries on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path, advance: Callable[[int], object] = lambda num_bytes: None) -> FileFacts:
    """Size and CRC-32 of a file, read in pieces; `advance` is told the bytes of each."""
    value = size = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(2**22):
            value, size = zlib.crc32(piece, value), size + len(piece)
            advance(len(piece))
    return {"bytes": size, "crc32": f"{value:08x}"}


def publish(folder: Path, files: Mapping[str, FileFacts]) -> int:
    """Make the checkpoint that lies in `temporary_folder(folder)` complete, under its name, and the latest.

    Args:
        files: all that were written, by their paths in the folder, each of them synced.

    Returns:
        Its bytes.
    """
    temporary = temporary_folder(folder)
    for inner in {(temporary / name).parent for name in files}:
        sync_folder(inner)
    write_synced(temporary / COMPLETE, json.dumps({"files": dict(files)}, indent=1).encode())
    sync_folder(temporary)
    if folder.exists():  # the same step, once more; deleting it would take a while without any of this name
        _set_aside(folder)
    temporary.rename(folder)
    sync_folder(folder.parent)
    point_to(folder, LATEST)
    return sum(facts["bytes"] for facts in files.values())


def point_to(folder: Path, name: str) -> None:
    """Let `latest` or `best` name this checkpoint."""
    pointer = folder.parent / name
    write_synced(pointer.with_suffix(".tmp"), f"{folder.name}\n".encode())
    pointer.with_suffix(".tmp").replace(pointer)
    sync_folder(folder.parent)


def pointed_to(root: Path, name: str) -> str | None:
    """The name of the checkpoint that `latest` or `best` names."""
    with contextlib.suppress(OSError):
        return (root / name).read_text().strip()
    return None


def remove(folder: Path) -> None:
    """Delete a checkpoint; first it stops saying that it is one."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def keep_only(root: Path, keep_last: int) -> None:
    """Delete what is older than the last `keep_last`, but for the best one, and what was given up."""
    best = pointed_to(root, BEST)
    for folder in checkpoints(root)[keep_last:]:
        if folder.name != best:
            remove(folder)
    for folder in root.glob(f"step-*{_GIVEN_UP}"):
        remove(folder)


def give_up_after(root: Path, step: int) -> None:
    """Let later checkpoints be none any more: a run goes on from this step, and they are not of its course.

    They keep their contents, under other names, until the run has a new one.
    """
    for folder in checkpoints(root):
        if step_of(folder) > step:
            if pointed_to(root, BEST) == folder.name:
                (root / BEST).unlink()
            _set_aside(folder)


def _set_aside(folder: Path) -> None:
    aside = folder.with_name(folder.name + _GIVEN_UP)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def remove_leftovers(root: Path) -> None:
    """Delete what a run that was killed left half written, or half deleted."""
    for folder in set(root.glob("step-*")) - set(root.glob(f"step-*{_GIVEN_UP}")):
        is_whole = _STEP.fullmatch(folder.name) and (folder / COMPLETE).is_file()
        if folder.is_dir() and not is_whole:
            shutil.rmtree(folder, ignore_errors=True)


def listed_files(folder: Path) -> dict[str, FileFacts]:
    """What COMPLETE lists.

    Raises:
        ValueError: where it cannot be read.
    """
    try:
        files = json.loads((folder / COMPLETE).read_bytes())["files"]
        return {
            str(name): {"bytes": int(facts["bytes"]), "crc32": str(facts["crc32"])} for name, facts in files.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{COMPLETE} cannot be read ({type(error).__name__})") from error


def damage(folder: Path, names: Iterable[str] | None = None) -> str:
    """What is wrong with the checkpoint's files, as a clause, or "".

    Args:
        names: the files whose contents to read; the others are looked at for their size alone. Unset: all.
    """
    try:
        files = listed_files(folder)
    except ValueError as error:
        return str(error)
    wanted = set(files if names is None else names)
    for name, facts in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != facts["bytes"]:
                return f"{name} has {size} bytes instead of {facts['bytes']}"
            if name in wanted and checksum(path)["crc32"] != facts["crc32"]:
                return f"{name} is not what was written (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""
