"""Whether a path that a file names stays in that file's folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def is_inside(folder: Path, name: str) -> bool:
    """Whether `folder / name` lies in the folder: neither `..`, nor an absolute path, nor a link leads out of it.

    The folder itself may be reached by a link.
    """
    path = PurePosixPath(name)
    if "\0" in name or path.is_absolute() or ".." in path.parts or not path.parts:
        return False
    return Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder))
