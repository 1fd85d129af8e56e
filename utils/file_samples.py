"""Samples of a file, to tell files apart without reading all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def evenly_spaced_parts(path: Path, number: int, num_bytes: int) -> Iterator[bytes]:
    """Parts of a file, spread from its first bytes to its last. They overlap if the file is small.

    Args:
        number: of parts, at least 2.
        num_bytes: of each part.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        for index in range(number):
            file.seek(max(0, size - num_bytes) * index // (number - 1))
            yield file.read(num_bytes)
