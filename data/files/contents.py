"""Digests of what files hold. A file is read as a whole once, and again if it may have changed since.

Times and sizes alone do not tell files apart: a copy may keep both, and the time of a file can be set.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from data.cache_folder import cache_folder
from utils.atomic_write import write_atomically
from utils.file_samples import evenly_spaced_parts

_FOLDER = "finetuning-contents"  # in the cache: what was read, and the digests
_NUM_BLOCKS, _BLOCK_BYTES = 8, 2**12  # compared besides inode, size and times
_SMALL_BYTES = 2**17  # a file is read each time, which takes no longer than to look whether it changed
_READ_BYTES = 2**22
_THREADS = 16  # that wait for the disk, most of the time
_SETTLED_SECONDS = 2.0  # a later change of a file that changed just now may leave its times as they are


def contents_of(files: Sequence[Path]) -> str:
    """A digest of the bytes of these files, in their order, whatever their names are.

    Raises:
        OSError: if one cannot be read.
    """
    digests = {file: _read(file) for file in files if file.stat().st_size <= _SMALL_BYTES}
    if large := [file for file in files if file not in digests]:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests |= zip(large, pool.map(_contents_of_large, large), strict=True)
    return xxhash.xxh3_128_hexdigest(" ".join(digests[file] for file in files).encode())


def _contents_of_large(file: Path) -> str:
    file = file.resolve()  # a link that was moved leads to another
    note = cache_folder() / _FOLDER / f"{xxhash.xxh3_128_hexdigest(os.fsencode(file))}.json"
    looks = _looks(file)
    with suppress(OSError, ValueError, LookupError, TypeError):  # no note, or a damaged one
        known_looks, digest = json.loads(note.read_bytes())
        if known_looks == looks and isinstance(digest, str):
            return digest
    digest = _read(file)
    if looks == _looks(file) and time.time() - max(looks[2], looks[3]) / 1e9 > _SETTLED_SECONDS:
        with suppress(OSError):  # then it is read again next time
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps([looks, digest]))
    return digest


def _looks(file: Path) -> list[int]:
    """Inode, size, the times of its last change (in ns; no program can set the second), and a sample of its bytes."""
    status, sample = file.stat(), xxhash.xxh3_64()
    for part in evenly_spaced_parts(file, _NUM_BLOCKS, _BLOCK_BYTES):
        sample.update(part)
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, sample.intdigest()]


def _read(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream:
        while part := stream.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
