"""The copy of the final state that --dist_checkpoint_root_folder asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from checkpointing.folder import COMPLETE, STATE, listed_files, write_synced
from checkpointing.huggingface_files import FOLDER as SETTINGS
from checkpointing.writing import FULL_FILE, CheckpointError, Contents, write_contents
from utils.atomic_write import sync_folder
from utils.distributed import on_rank_zero

BEGUN = "copy.incomplete"  # there from the first file of a copy to its COMPLETE


def foreign_copy(folder: Path) -> list[str]:
    """What others put where the copy is written.

    An earlier copy is known by its COMPLETE, an unfinished one by `BEGUN`.
    """
    if (folder / BEGUN).is_file():
        return []
    try:
        listed = listed_files(folder)
    except ValueError:
        listed = {}
    ours = {name.split("/")[0] for name in listed} | ({COMPLETE} if listed else set())
    return [path.name for path in copied_entries(folder) if path.name not in ours and os.path.lexists(path)]


def copied_entries(folder: Path) -> list[Path]:
    """What a copy in the folder consists of."""
    names = (COMPLETE, STATE, FULL_FILE, ".metadata", SETTINGS)
    return [*(folder / name for name in names), *sorted(folder.glob("*.distcp"))]


def save_copy(folder: Path, tensors: Mapping[str, torch.Tensor], files: Mapping[str, bytes], *, full: bool) -> None:
    """Write a checkpoint's files into this very folder, COMPLETE last. Every rank must call this.

    Raises:
        CheckpointError: on every rank, if any rank failed.
    """

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if foreign := foreign_copy(folder):
            raise CheckpointError(f"{', '.join(foreign)} there was not written by this program")
        write_synced(folder / BEGUN, b"")
        (folder / COMPLETE).unlink(missing_ok=True)
        for file in (folder / FULL_FILE, folder / ".metadata", *folder.glob("*.distcp")):
            file.unlink(missing_ok=True)  # an earlier copy's, perhaps of the other type or of more ranks

    def end() -> None:
        write_synced(folder / COMPLETE, json.dumps({"files": written}, indent=1).encode())
        (folder / BEGUN).unlink()
        sync_folder(folder)

    try:
        on_rank_zero(begin)
        written = write_contents(folder, Contents(tensors, full=full, rng=None, files=files))
        on_rank_zero(end)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error
