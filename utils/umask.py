"""Gives files of other libraries the mode that the umask asks for."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def follow_umask(folder: Path) -> None:
    """Give every file in a folder the mode that a new file gets there.

    safetensors writes through a temporary file that only the owner may read. Python reads the umask only by setting it
    for a moment, for other threads too, so a new file shows it instead.
    """
    probe = folder / f".umask-{secrets.token_hex(4)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # a file system without modes
                path.chmod(mode)
