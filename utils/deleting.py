"""Deletes folders on disks that may refuse it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path


def delete_folder(folder: Path) -> None:
    """Delete a folder as far as the disk lets it; the rest stays, and no error is raised."""
    with suppress(OSError):  # of fstat and close, which rmtree raises in any case
        shutil.rmtree(folder, ignore_errors=True)
