"""Whether a path that a file names stays in that file's folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def is_inside(folder: Path, name: str) -> bool:
    """Whether `folder / name` lies in the folder: neither `..`, nor an absolute path, nor a link leads out of it.

    The folder itself may be reached by a link.
    """
    if leads_out(name):
        return False
    return Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder))


def leads_out(name: str) -> bool:
    """Whether a path leads out of its folder, or nowhere, by its text alone; links are not looked at."""
    path = PurePosixPath(name)
    return "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts
