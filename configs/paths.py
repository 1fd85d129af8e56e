"""Refuse paths that the system cannot have, whatever is there."""

import os

_ROOM_BYTES = 256  # for the names of files below the run folder


def check_path(path: str) -> None:
    """Check that a path can be written out and is not too long. Nothing needs to be there.

    Raises:
        ValueError: with the reason and the remedy.
    """
    absolute = os.path.expanduser(path)
    if absolute.startswith("~") and not os.path.lexists(path):
        raise ValueError(f"{path.partition('/')[0]!r} is nobody's home folder here; write the whole path")
    absolute = os.path.abspath(absolute)
    longest = max(len(os.fsencode(name)) for name in absolute.split("/"))
    for what, num_bytes, limit in (
        ("a name in the path", longest, os.pathconf("/", "PC_NAME_MAX")),
        ("the path", len(os.fsencode(absolute)), os.pathconf("/", "PC_PATH_MAX") - _ROOM_BYTES),
    ):
        if num_bytes > limit:
            raise ValueError(f"{what} is {num_bytes:,} bytes long; give one of at most {limit:,}")
