"""One checkpoint written to the disk: all of it or nothing."""

from __future__ import annotations

import io
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from checkpointing.trained import nested
from ranks.collectives import gather_to_all, on_rank_zero
from run_folder.checkpoint_folder import (
    BEST,
    FULL_FILE,
    FileEntry,
    checksum,
    keep_only,
    point_to,
    publish,
    temporary_folder,
    write_synced,
)
from utils.atomic_write import sync_folder
from utils.units import readable


class CheckpointError(Exception):
    """A checkpoint could not be written; the message says why. Raised on every rank."""


@dataclass(frozen=True)
class Contents:
    """What one rank contributes to a checkpoint."""

    tensors: Mapping[str, torch.Tensor]  # sharded as in the model; if `full`, whole on rank 0
    full: bool  # one file, written by rank 0
    rng: Mapping[str, Any] | None  # states of this rank's generators
    files: Mapping[str, bytes]  # small files; rank 0's are written


def write_checkpoint(
    folder: Path, contents: Contents, *, group: dist.ProcessGroup | None = None, keep_last: int, best: bool = False
) -> int:
    """Write a checkpoint beside the earlier ones and delete those no longer kept. Every rank must call this.

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

        def end() -> int:
            size = publish(folder, files)
            if best:
                point_to(folder, BEST)
            keep_only(folder.parent, keep_last)
            return size

        return on_rank_zero(end, group)
    except (CheckpointError, OSError, RuntimeError) as error:
        _give_up(temporary, group)
        raise CheckpointError(str(error)) from error


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
    rng_files = _rng_files(contents, group)
    written: dict[str, FileEntry] = {}
    if not contents.full:
        written |= _write_shards(folder, contents.tensors, group)
    failure = None
    try:
        written |= _write_own(folder, contents, rng_files)
        if dist.get_rank() == 0 and not contents.full:
            written[".metadata"] = checksum(folder / ".metadata")
    except Exception as error:
        failure = f"rank {dist.get_rank()}: {error}"
    of_ranks = gather_to_all((written, failure), group)
    for _, failed in of_ranks:
        if failed is not None:
            raise CheckpointError(failed)
    return {name: file for files, _ in of_ranks for name, file in files.items()}


def _write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[str, FileEntry]:
    writer = _ChecksummingWriter(folder)
    try:
        dcp.save(nested(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:  # a BaseException, raised on every rank with the failed ranks' tracebacks
        causes = gather_to_all(writer.fs.cause, group)
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {rank}: {causes[rank] or cause}") from error
    return writer.fs.written


def _rng_files(contents: Contents, group: dist.ProcessGroup | None) -> dict[str, bytes]:
    """The files of random states that this rank writes: its own, or, of a full checkpoint, rank 0 those of all."""
    if contents.rng is None:
        return {}
    rank, buffer = dist.get_rank(), io.BytesIO()
    torch.save(dict(contents.rng), buffer)
    if not contents.full:
        return {rng_file(rank): buffer.getvalue()}
    of_ranks = gather_to_all(buffer.getvalue(), group)
    return {rng_file(other): data for other, data in enumerate(of_ranks)} if rank == 0 else {}


def _write_own(folder: Path, contents: Contents, rng_files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Write this rank's files besides its shards; rank 0's include a full checkpoint."""
    written = {name: write_synced(folder / name, data) for name, data in rng_files.items()}
    if dist.get_rank() != 0:
        return written
    if contents.full:
        with open(folder / FULL_FILE, "wb") as file:
            stream = _Checksummed(file)
            try:
                torch.save(dict(contents.tensors), stream)
                os.fsync(file.fileno())
            except RuntimeError as error:
                raise CheckpointError(stream.cause or str(error)) from error
            written[FULL_FILE] = stream.entry()
    for name, data in contents.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        written[name] = write_synced(folder / name, data)
    return written


def rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the whole tensors, however they are sharded."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _begin(temporary: Path, size: int) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    free = shutil.disk_usage(temporary.parent).free
    if free < size:
        raise CheckpointError(f"{temporary.parent} has {readable(free)} free, and a checkpoint needs {readable(size)}")
    temporary.mkdir()
    sync_folder(temporary.parent)


def _give_up(temporary: Path, group: dist.ProcessGroup | None) -> None:
    """Delete what the attempt wrote, once no rank writes any more."""
    dist.barrier(group)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)


class _Checksummed:
    """A file being written, with its checksum.

    `cause` keeps the system's reason for a failed write; torch's error only says where in the file it was.
    """

    def __init__(self, file: Any) -> None:
        self.file, self.crc32, self.size, self.cause = file, 0, 0, ""

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            self.crc32 = zlib.crc32(view, self.crc32)
            self.size += view.nbytes
            rest = view.cast("B")
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except OSError as error:
                self.cause = str(error)
                raise
            return view.nbytes

    def entry(self) -> FileEntry:
        return {"bytes": self.size, "crc32": f"{self.crc32:08x}"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _ChecksummingFileSystem(FileSystem):
    """Opens files for torch.distributed.checkpoint and keeps the checksum of what was written into each."""

    def __init__(self) -> None:
        self.written: dict[str, FileEntry] = {}
        self.cause = ""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb" or Path(path).suffix != ".distcp":
                yield stream
                return
            checksummed = _Checksummed(stream)
            try:
                yield checksummed
            finally:
                self.cause = checksummed.cause
            self.written[Path(path).name] = checksummed.entry()


class _ChecksummingWriter(FileSystemWriter):
    """Writes one file per rank by one thread; with several, torch loses errors."""

    fs: _ChecksummingFileSystem

    def __init__(self, path: Path) -> None:
        super().__init__(path, thread_count=1)
        self.fs = _ChecksummingFileSystem()
