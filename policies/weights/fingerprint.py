"""Digests that tell files of weights apart without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from utils.file_samples import evenly_spaced_parts

_NUM_SAMPLES, _SAMPLE_BYTES = 16, 2**16
_HEADER_BYTES = 2**26  # read at most: a damaged file may claim any length


def fingerprint_files(paths: Sequence[Path]) -> str:
    """A digest of the files' sizes and of evenly spaced parts of them.

    Two models of one shape differ nearly everywhere, so a megabyte of each file tells them apart.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        for part in evenly_spaced_parts(path, _NUM_SAMPLES, _SAMPLE_BYTES):
            digest.update(part)
    return digest.hexdigest()[:32]


def describe_file(path: Path) -> str:
    """The size of a safetensors file, and a digest of its header, with all names and shapes, and of those parts."""
    with open(path, "rb") as file:
        num_bytes = min(_HEADER_BYTES, int.from_bytes(file.read(8), "little"))
        header = hashlib.sha256(file.read(num_bytes))
    header.update(fingerprint_files([path]).encode())
    return f"{path.stat().st_size} bytes, digest {header.hexdigest()[:12]}"
