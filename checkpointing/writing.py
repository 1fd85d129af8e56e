"""One checkpoint written to the disk: all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.marks import KEY, Mark
from checkpointing.random_states import rng_bytes
from checkpointing.tensor_files import parts_to_write, whole_tensors, write_tensors
from ranks.collectives import gather_to_all, on_rank_zero
from run_folder.checkpoint_folder import (
    BEST,
    FULL_FILE,
    FileEntry,
    checksum_of,
    keep_only,
    point_to,
    publish,
    rng_file,
    shard_file,
    temporary_folder,
    write_synced,
)
from utils.atomic_write import sync_folder
from utils.deleting import delete_folder
from utils.units import readable


class CheckpointError(Exception):
    """A checkpoint could not be written; the message says why. Raised on every rank."""


@dataclass(frozen=True)
class Contents:
    """One rank's part of a checkpoint."""

    step: int
    tensors: Mapping[str, torch.Tensor]  # sharded as in the model; if `full`, whole on rank 0
    full: bool  # one file, written by rank 0
    rng: Mapping[str, Any] | None  # states of this rank's generators
    files: Mapping[str, bytes]  # small files; rank 0's are written


def write_checkpoint(
    folder: Path, contents: Contents, *, group: dist.ProcessGroup | None = None, keep_last: int, best: bool = False
) -> int:
    """Write a checkpoint next to the earlier ones, then delete those no longer kept. Every rank must call this.

    Args:
        group: for its collectives.
        best: whether it belongs to the best evaluation so far.

    Returns:
        Its bytes over all ranks.

    Raises:
        CheckpointError: on every rank, if any rank failed; earlier checkpoints are as they were.
    """
    temporary = temporary_folder(folder)
    try:
        on_rank_zero(lambda: _begin(temporary, num_bytes(contents.tensors)), group)
        files = write_contents(temporary, contents, group=group)
        return on_rank_zero(lambda: complete(folder, files, keep_last=keep_last, best=best), group)
    except (CheckpointError, OSError, RuntimeError) as error:
        _give_up(temporary, group)
        raise CheckpointError(str(error)) from error


def complete(folder: Path, files: Mapping[str, FileEntry], *, keep_last: int, best: bool) -> int:
    """Publish the checkpoint, and delete those no longer kept. Returns its bytes.

    Raises:
        OSError: if the disk refuses what makes it a checkpoint.
    """
    size = publish(folder, files)
    if best:
        point_to(folder, BEST)
    with suppress(OSError):  # it is complete: older ones stay until the next one deletes them
        keep_only(folder.parent, keep_last)
    return size


def write_contents(folder: Path, contents: Contents, *, group: dist.ProcessGroup | None = None) -> dict[str, FileEntry]:
    """Write the files into an existing folder, each synced. Every rank must call this.

    Returns:
        The files of all ranks, by name.
    """
    writes = dist.get_rank() == 0 or not contents.full
    if not all(gather_to_all(not writes or os.path.isdir(folder), group)):  # Path.is_dir raises if a server is gone
        raise CheckpointError(
            f"{folder.parent} is not the same folder on all nodes; it must be on a shared file system"
        )
    small = {name: checksum_of(data) for name, data in contents.files.items()}
    mark = on_rank_zero(lambda: Mark.of(contents.step, small), group)
    rng_files = _rng_files(contents, mark, group)
    failure, written = None, {}
    try:
        written = _write_own(folder, contents, mark, rng_files)
    except Exception as error:  # told to all ranks below: one that raised here would leave the others waiting
        failure = f"rank {dist.get_rank()}: {error}"
    of_ranks = gather_to_all((written, failure), group)
    for _, failed in of_ranks:
        if failed is not None:
            raise CheckpointError(failed)
    return {name: file for files, _ in of_ranks for name, file in files.items()}


def _rng_files(contents: Contents, mark: Mark, group: dist.ProcessGroup | None) -> dict[str, bytes]:
    """The files of random states that this rank writes: its own; of a full checkpoint rank 0 writes those of all."""
    if contents.rng is None:
        return {}
    rank = dist.get_rank()
    data = rng_bytes(contents.rng, mark.as_json(rng_file(rank)))
    if not contents.full:
        return {rng_file(rank): data}
    of_ranks = gather_to_all(data, group)
    return {rng_file(other): data for other, data in enumerate(of_ranks)} if rank == 0 else {}


def _write_own(folder: Path, contents: Contents, mark: Mark, rng_files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Write this rank's files; rank 0 writes the small ones that all share, and a full checkpoint."""
    written = {name: write_synced(folder / name, data) for name, data in rng_files.items()}
    rank = dist.get_rank()
    if not contents.full:
        parts, name = parts_to_write(contents.tensors), shard_file(rank)
        written[name] = write_tensors(folder / name, parts, _header(mark, name))
    if rank != 0:
        return written
    if contents.full:
        parts = whole_tensors(contents.tensors)
        written[FULL_FILE] = write_tensors(folder / FULL_FILE, parts, _header(mark, FULL_FILE))
    for name, data in contents.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written[name] = write_synced(folder / name, data)
    return written


def _header(mark: Mark, name: str) -> dict[str, str]:
    return {KEY: json.dumps(mark.as_json(name))}


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the whole tensors, however they are sharded."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _begin(temporary: Path, size: int) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    delete_folder(temporary)
    free = shutil.disk_usage(temporary.parent).free
    if free < size:
        raise CheckpointError(f"{temporary.parent} has {readable(free)} free, and a checkpoint needs {readable(size)}")
    temporary.mkdir()
    sync_folder(temporary.parent)


def _give_up(temporary: Path, group: dist.ProcessGroup | None) -> None:
    """Delete what the attempt wrote, once no rank writes any more."""
    dist.barrier(group)
    if dist.get_rank() == 0:
        delete_folder(temporary)
