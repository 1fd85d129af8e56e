"""The copy of the final state for --dist_checkpoint_root_folder: its files."""

from __future__ import annotations

import os
from pathlib import Path

from run_folder.checkpoint_folder import COMPLETE, HUGGINGFACE, STATE, listed_files, old_tensor_files, tensor_files

BEGUN = "copy.incomplete"  # there from the first file of a copy to its COMPLETE


def foreign_copy(folder: Path) -> list[str]:
    """Names of files in the copy's place that this program did not write.

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
    """The files and folders of a copy in this folder."""
    named = [folder / name for name in (COMPLETE, STATE, HUGGINGFACE)]
    return [*named, *tensor_files(folder), *old_tensor_files(folder)]
