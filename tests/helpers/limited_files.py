"""A limit on the size of files. It stands for a full disk: both are found out when a file is open."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """While this lasts, what this process writes beyond so many bytes is refused with EFBIG, "File too large"."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
