"""The copy of the final state that --dist_checkpoint_root_folder asks for."""

from __future__ import annotations

import json
from pathlib import Path

from checkpointing.writing import CheckpointError, Contents, write_contents
from ranks.collectives import on_rank_zero
from run_folder.checkpoint_folder import COMPLETE, old_tensor_files, tensor_files, write_synced
from run_folder.final_copy import BEGUN, foreign_copy
from utils.atomic_write import sync_folder


def save_copy(folder: Path, contents: Contents) -> None:
    """Write a checkpoint's files into this very folder, COMPLETE last. Every rank must call this.

    Raises:
        CheckpointError: on every rank, if any rank failed.
    """

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if foreign := foreign_copy(folder):
            raise CheckpointError(f"{', '.join(foreign)} there was not written by this program")
        # While COMPLETE is missing, BEGUN says that these files are ours: a killed run's next try may replace them.
        write_synced(folder / BEGUN, b"")
        (folder / COMPLETE).unlink(missing_ok=True)
        for file in (*tensor_files(folder), *old_tensor_files(folder)):
            file.unlink(missing_ok=True)  # an earlier copy's, perhaps of the other type or of more ranks

    def end() -> None:
        write_synced(folder / COMPLETE, json.dumps({"files": written}, indent=1).encode())
        (folder / BEGUN).unlink()
        sync_folder(folder)

    try:
        on_rank_zero(begin)
        written = write_contents(folder, contents)
        on_rank_zero(end)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error
