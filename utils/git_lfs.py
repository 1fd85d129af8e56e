"""Pointers of Git LFS: `git clone` writes three lines in place of a large file if git lfs is not installed."""

from __future__ import annotations

from pathlib import Path

PULL = "it is a pointer of git lfs, not the file; fetch that with `git lfs pull` in its folder"
_FIRST_LINE = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024  # bytes, as git lfs itself takes them


def is_pointer(file: Path) -> bool:
    """Whether a file holds a pointer alone."""
    # The size first: weights are not read for this.
    return file.is_file() and file.stat().st_size < _LONGEST and file.read_bytes().startswith(_FIRST_LINE)
