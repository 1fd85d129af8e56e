"""Files that are written as a whole, and named if the disk refuses them.

A reader of a file that is being replaced finds the earlier contents or the new ones, whole.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from utils.errors import RunError


class FileWriteError(RunError, OSError):
    """A file could not be written. The message is one line: the file, the reason and, of a full disk, the remedy.

    Callers that go on without the file catch it as the OSError that it is, with errno, strerror and filename.
    """

    def __init__(self, file: Path, error: OSError) -> None:
        reason = error.strerror or str(error)
        remedy = "; make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        super().__init__(" ".join(f"{file} cannot be written ({reason}){remedy}".splitlines()))
        self.errno, self.strerror, self.filename = error.errno, reason, str(file)

    def __str__(self) -> str:
        return str(self.args[0])  # OSError's own text has no remedy


def write_atomically(file: Path, contents: str | bytes, *, sync: bool = False) -> None:
    """Write a file next to the target, then rename it. If that fails, an earlier file is as it was.

    Args:
        contents: text is written as UTF-8.
        sync: file and name are on the disk when this returns, so that a power failure takes neither.

    Raises:
        FileWriteError: an OSError, if the disk or the folder refuses.
    """
    data = contents.encode() if isinstance(contents, str) else contents
    # Two processes may write the same file. Of a long name a part is kept: a name has at most 255 bytes.
    temporary = file.with_name(f"{file.name[:50]}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as half:
            half.write(data)
            if sync:
                half.flush()
                os.fsync(half.fileno())
        temporary.replace(file)
        if sync:
            sync_folder(file.parent)
    except OSError as error:
        raise FileWriteError(file, error) from error
    finally:
        with suppress(OSError):  # it is there only if something failed, Ctrl-C included
            temporary.unlink()


def write_in_place(file: Path, text: str) -> None:
    """Write into the file that is there, or a new one. For paths that a user names: /dev/stdout and pipes stay such.

    Raises:
        FileWriteError: an OSError, if the disk or the folder refuses; a part of the text may be there then.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileWriteError(file, error) from error


def sync_folder(folder: Path) -> None:
    """Write the folder's own entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
