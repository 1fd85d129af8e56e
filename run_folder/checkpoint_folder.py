"""The folder of a checkpoint: complete or not there at all, and checked before it is read.

    checkpoints/step-00000020/   COMPLETE, written last, lists every file with its size and checksum
    checkpoints/latest           names the newest complete one
    checkpoints/best             names that of the best evaluation (--keep_best)

Files are written to `step-00000020.incomplete`, which is renamed when all of them are on the disk. A checkpoint that is
to be deleted gets that name again first. Others' files may lie next to these folders: what is deleted here either has
such a name or holds a COMPLETE or a state.json that this program wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from utils.atomic_write import sync_folder, write_atomically
from utils.deleting import delete_folder
from utils.inside import is_inside
from utils.small_files import is_there, open_regular, read_json, read_text

COMPLETE, LATEST, BEST, STATE = "COMPLETE", "latest", "best", "state.json"
FULL_FILE = "state.safetensors"  # all tensors in one file, if --checkpoint_type asks for it
OLD_FULL_FILE = "state.pt"  # the same of earlier versions
HUGGINGFACE = "huggingface"  # the folder of config.json, tokenizer and the like
STREAM = "stream.json"  # where a streamed run was in its data (`data.streaming.steps`)
_INCOMPLETE, _GIVEN_UP = ".incomplete", ".given-up"
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(rf"{_STEP.pattern}({re.escape(_INCOMPLETE)}|{re.escape(_GIVEN_UP)})")
_RANK_FILE = re.compile(r"rank-\d{5,}\.safetensors|rng-\d{5,}\.json")
_POINTER = re.compile(rf"\0*|{_STEP.pattern}\n?")  # zeros: what a power failure may leave

FileEntry = dict[str, Any]  # {"bytes": int, "crc32": "8 hex digits"}, as COMPLETE lists a file


def shard_file(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def rng_file(rank: int) -> str:
    """The file of a rank's random states."""
    return f"rng-{rank:05d}.json"


def is_rank_file(name: str) -> bool:
    """Whether a file of a checkpoint has tensors or random states; the others are small, and rank 0 writes them."""
    return name == FULL_FILE or _RANK_FILE.fullmatch(name) is not None


def tensor_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's tensors; none in one of an earlier version (`checkpointing/old_format`)."""
    named = [path] if os.path.lexists(path := folder / FULL_FILE) else []
    return [*named, *sorted(folder.glob("rank-*.safetensors"))]


def old_tensor_files(folder: Path) -> list[Path]:
    """The files of the tensors, and their index, in a checkpoint of an earlier version."""
    named = [path for name in (OLD_FULL_FILE, ".metadata") if os.path.lexists(path := folder / name)]
    return [*named, *sorted(folder.glob("*.distcp"))]


def is_gathered(folder: Path) -> bool:
    """Whether one file holds all tensors of a checkpoint, so that rank 0 can send them to the others."""
    return any((folder / name).is_file() for name in (FULL_FILE, OLD_FULL_FILE))


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def temporary_folder(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder.with_name(folder.name + _INCOMPLETE)


def is_step_folder(folder: Path) -> bool:
    """Whether its name is a checkpoint's; it need not be complete."""
    return _STEP.fullmatch(folder.name) is not None


def step_of(folder: Path) -> int:
    """The step in the folder's name."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named like a checkpoint")
    return int(match.group(1))


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints, newest first; also those of which a disk that fails does not tell.

    Raises:
        OSError: if the folder cannot be listed. A run that took it for empty would start afresh, and delete them all.
    """
    folders = [path for path in _entries(root) if is_step_folder(path) and is_there(path / COMPLETE) is not False]
    return sorted(folders, key=step_of, reverse=True)


def _entries(root: Path) -> list[Path]:
    """What lies in a folder; nothing if there is none. pathlib's glob takes a folder that it may not list for empty."""
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def incomplete_checkpoints(root: Path, *, after: int) -> list[Path]:
    """The folders of checkpoints after this step that were not written to the end, or lack COMPLETE; newest first."""
    found = []
    for path in _entries(root):
        named = path.with_name(path.name.removesuffix(_INCOMPLETE))
        is_complete = named == path and (path / COMPLETE).is_file()
        if is_step_folder(named) and step_of(named) > after and path.is_dir() and not is_complete:
            found.append((step_of(named), path))
    return [path for _, path in sorted(found, reverse=True)]


def is_ours(path: Path) -> bool:
    """Whether this program wrote it: a checkpoint, or one that is half written or given up. Never a symbolic link."""
    if path.is_symlink() or not path.is_dir():
        return False
    return _TEMPORARY.fullmatch(path.name) is not None or (is_step_folder(path) and _has_marker(path))


def foreign_entries(root: Path) -> list[str]:
    """Entries that others put in the places of checkpoints, `latest` and `best`, and that would have to be replaced."""
    if not root.is_dir():
        return []
    steps = sorted(path for path in root.iterdir() if is_step_folder(path))
    found = [path.name for path in steps if not (path.is_dir() and (_has_marker(path) or not any(path.iterdir())))]
    return found + [name for name in (LATEST, BEST) if os.path.lexists(root / name) and not _is_pointer(root / name)]


def remove_all(root: Path) -> None:
    """Delete every checkpoint of this program, and what names one of them; nothing else."""
    for path in list(root.iterdir()) if root.is_dir() else []:
        if is_ours(path):
            remove(path)
        elif path.name in (LATEST, BEST) and _is_pointer(path):
            path.unlink()


def _has_marker(folder: Path) -> bool:
    """Whether the folder holds a COMPLETE or a state.json that this program wrote; one of the two may be damaged."""
    with contextlib.suppress(ValueError):
        return bool(listed_files(folder))
    with contextlib.suppress(OSError, ValueError):
        state = read_json(folder / STATE)
        return isinstance(state, dict) and {"state", "settings"} <= state.keys()
    return False


def _is_pointer(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return _POINTER.fullmatch(file.read(100).decode("latin-1")) is not None  # latin-1 decodes any byte


class RunningChecksum:
    """Size and CRC-32 of a file whose blocks are added in order."""

    def __init__(self) -> None:
        self._size = self._crc32 = 0

    def add(self, block: bytes | memoryview) -> None:
        self._size, self._crc32 = self._size + len(block), zlib.crc32(block, self._crc32)

    def entry(self) -> FileEntry:
        """As COMPLETE lists the file."""
        return {"bytes": self._size, "crc32": f"{self._crc32:08x}"}


def write_synced(path: Path, data: bytes) -> FileEntry:
    """Write a file that is on the disk when this returns."""
    found = RunningChecksum()
    with open(path, "wb") as file:
        file.write(data)
        found.add(data)
        file.flush()
        os.fsync(file.fileno())
    return found.entry()


def checksum_of(data: bytes) -> FileEntry:
    """Size and CRC-32 of a file with these contents."""
    found = RunningChecksum()
    found.add(data)
    return found.entry()


def checksum(path: Path, advance: Callable[[int], object] = lambda num_bytes: None) -> FileEntry:
    """Size and CRC-32 of a file, read in blocks; `advance` is called with the bytes of each."""
    found = RunningChecksum()
    with open_regular(path) as file:
        while block := file.read(2**22):
            found.add(block)
            advance(len(block))
    return found.entry()


def publish(folder: Path, files: Mapping[str, FileEntry]) -> int:
    """Complete the checkpoint in `temporary_folder(folder)`, give it its name, and point `latest` to it.

    Args:
        files: all that were written, by their paths in the folder, each synced.

    Returns:
        Its bytes.
    """
    temporary = temporary_folder(folder)
    # Syncing a file does not sync its name in the folder. COMPLETE must not reach the disk before any of these.
    for inner in {(temporary / name).parent for name in files}:
        sync_folder(inner)
    write_synced(temporary / COMPLETE, json.dumps({"files": dict(files)}, indent=1).encode())
    sync_folder(temporary)
    if folder.exists():  # saved before; deleting it first would leave no checkpoint of this name for a while
        _set_aside(folder)
    temporary.rename(folder)
    sync_folder(folder.parent)
    point_to(folder, LATEST)
    return sum(file["bytes"] for file in files.values())


def point_to(folder: Path, name: str) -> None:
    """Make `latest` or `best` name this checkpoint."""
    write_atomically(folder.parent / name, f"{folder.name}\n", sync=True)


def pointed_to(root: Path, name: str) -> str | None:
    """The name of the checkpoint that `latest` or `best` names."""
    with contextlib.suppress(OSError, ValueError):
        return read_text(root / name).strip()
    return None


def remove(folder: Path) -> None:
    """Delete a checkpoint, under its temporary name, so that no half of one looks complete or like another's."""
    doomed = folder
    if is_step_folder(folder):
        doomed = temporary_folder(folder)
        delete_folder(doomed)
        folder.rename(doomed)
    delete_folder(doomed)


def keep_only(root: Path, keep_last: int) -> None:
    """Delete checkpoints older than the last `keep_last`, except the best one, and those that were set aside."""
    # Called once a new checkpoint is complete, so those that a resumed run gave up are no longer needed either.
    best = pointed_to(root, BEST)
    for folder in checkpoints(root)[keep_last:]:
        if folder.name != best and is_ours(folder):
            remove(folder)
    for folder in root.glob(f"step-*{_GIVEN_UP}"):
        if folder.is_symlink():
            folder.unlink()  # what it links to is elsewhere, and stays
        elif is_ours(folder):
            remove(folder)


def give_up_after(root: Path, step: int) -> None:
    """Set aside checkpoints after `step`; the resumed run replaces them.

    They keep their contents under other names until the run has a new checkpoint.
    """
    for folder in checkpoints(root):
        if step_of(folder) > step:
            if pointed_to(root, BEST) == folder.name:  # or the next checkpoint of this step would pass for it
                (root / BEST).unlink()
            _set_aside(folder)


def _set_aside(folder: Path) -> None:
    if not folder.is_symlink() and not is_ours(folder) and any(folder.iterdir()):
        raise OSError(f"{folder} is there, and this program did not write it")
    aside = folder.with_name(folder.name + _GIVEN_UP)
    delete_folder(aside)
    folder.rename(aside)


def remove_leftovers(root: Path) -> None:
    """Delete what a killed run left half written or half deleted.

    A checkpoint that lost its COMPLETE is set aside: no run leaves that, but somebody's copying may.
    """
    for folder in set(root.glob("step-*")) - set(root.glob(f"step-*{_GIVEN_UP}")):
        if not is_ours(folder) or (is_step_folder(folder) and (folder / COMPLETE).is_file()):
            continue
        if is_step_folder(folder):
            _set_aside(folder)
        else:
            remove(folder)


def listed_files(folder: Path) -> dict[str, FileEntry]:
    """The files that COMPLETE lists.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        files = read_json(folder / COMPLETE)["files"]
        listed = {str(name): {"bytes": int(file["bytes"]), "crc32": str(file["crc32"])} for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{COMPLETE} cannot be read ({type(error).__name__})") from error
    for name in listed:
        if not is_inside(folder, name):
            raise ValueError(f"{COMPLETE} lists {name[:200]!r}, which leads outside the folder")
    return listed


def damage(folder: Path, names: Iterable[str] | None = None) -> str:
    """A clause that says what is wrong with the checkpoint's files; "" if nothing is.

    Args:
        names: the files whose contents to read; only the size of the others is checked. None: all.
    """
    try:
        files = listed_files(folder)
    except ValueError as error:
        return str(error)
    wanted = set(files if names is None else names)
    for name, listed in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != listed["bytes"]:
                return f"{name} has {size} bytes instead of {listed['bytes']}"
            if name in wanted and checksum(path)["crc32"] != listed["crc32"]:
                return f"{name} is not what was written (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""
