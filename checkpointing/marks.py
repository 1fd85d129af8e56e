"""The mark by which each file of a checkpoint says which checkpoint it was written for, and as which file.

COMPLETE lists checksums, which anybody can write anew. The marks tie the large files to the small ones: a shard of
another step, a shard in another's place, or a state.json that was changed since does not pass for what was saved.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from run_folder.checkpoint_folder import (
    FULL_FILE,
    STATE,
    FileEntry,
    is_rank_file,
    listed_files,
    rng_file,
    shard_file,
    tensor_files,
)
from utils.small_files import read_json

KEY = "checkpoint"  # in the header of a file of tensors, and in that of random states
FORMAT = 2  # of state.json: every file that `is_rank_file` names has a mark


class Mark(NamedTuple):
    """The checkpoint that a file was written for."""

    step: int
    small_files: str  # the checksum of their names and checksums

    @classmethod
    def of(cls, step: int, files: Mapping[str, FileEntry]) -> Mark:
        """The mark of a checkpoint with these files, of which those with a mark of their own do not count."""
        lines = (f"{name} {file['crc32']}\n" for name, file in sorted(files.items()) if not is_rank_file(name))
        return cls(step, f"{zlib.crc32(''.join(lines).encode()):08x}")

    def as_json(self, name: str) -> dict[str, Any]:
        """The values that the file of this name carries."""
        return {"step": self.step, "small_files": self.small_files, "file": name}


def foreign_file(folder: Path, values: Mapping[str, Any], names: Iterable[str]) -> str:
    """A clause on the first file that does not belong to the checkpoint; "" if all do. Earlier versions wrote no marks.

    Args:
        values: those of its state.json.
        names: the files whose marks are read.

    Raises:
        ValueError: if COMPLETE cannot be read.
    """
    listed = listed_files(folder)
    if unlisted := [path.name for path in tensor_files(folder) if path.name not in listed]:
        return f"{unlisted[0]} is not among the files that it was written with"
    has_marks = values.get("format") == FORMAT
    if has_marks and (reason := _other_ranks(listed, values["world_size"])):
        return reason
    wanted = Mark.of(values["state"]["step"], listed)
    for name in filter(is_rank_file, names):
        try:
            found = _mark_in(folder / name)
        except Exception as error:  # of safetensors, or of anything else that the header is
            if has_marks:
                return f"{name} cannot be read ({type(error).__name__})"
            continue  # it is read again, and refused then
        if found == wanted.as_json(name) or (found is None and not has_marks):
            continue
        step, file = (found.get("step"), found.get("file")) if isinstance(found, dict) else (None, None)
        if step != wanted.step:
            return f"{name} is of step {step}, and {STATE} of step {wanted.step}" if step else f"{name} names no step"
        if file != name:
            return f"{name} was written as {file}"
        return f"{name} was not written together with {STATE} and the other small files, or these were changed since"
    return ""


def _other_ranks(listed: Iterable[str], world_size: int) -> str:
    """A clause on a rank's file that is not listed, or that no rank has written. A copy of the final state has no
    random states."""
    names = {name for name in listed if is_rank_file(name)}
    wanted = {FULL_FILE} if FULL_FILE in names else {shard_file(rank) for rank in range(world_size)}
    if any(name.startswith("rng-") for name in names):
        wanted |= {rng_file(rank) for rank in range(world_size)}
    if wanted - names:
        return f"{min(wanted - names)} is missing"
    return f"{min(names - wanted)} is of no rank of the run that wrote it" if names - wanted else ""


def _mark_in(path: Path) -> Any:
    if path.suffix == ".json":
        return read_json(path).get(KEY)
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {}).get(KEY, "null"))
