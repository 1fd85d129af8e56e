"""The bytes of a file in chunks of whole rows, from any chunk on. Where a chunk ends depends on its start alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import pyarrow as pa

CHUNK_BYTES = 2**22
UTF8_MARK = b"\xef\xbb\xbf"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def is_compressed(file: Path) -> bool:
    return file.suffix in _COMPRESSIONS


def opened(file: Path) -> IO[bytes]:
    """The file's bytes, decompressed by its name."""
    stream = open(file, "rb")  # noqa: SIM115 (the caller closes it)
    compression = _COMPRESSIONS.get(file.suffix)
    return stream if compression is None else cast(IO[bytes], pa.CompressedInputStream(stream, compression))


def end_of_lines(data: bytes) -> int:
    """Where the last whole line of these bytes ends; 0 without one."""
    return data.rfind(b"\n") + 1


class ByteChunks:
    """Chunks of a file, which may be asked for in any order; a compressed file is read up to them.

    Args:
        last_end: where the last whole row of some bytes ends, or 0. They begin where a row does.
        most: bytes of a row; a chunk that is longer is cut there.
    """

    def __init__(self, file: Path, last_end: Callable[[bytes], int] = end_of_lines, most: int | None = None) -> None:
        self.file, self.last_end, self.most = file, last_end, most
        self._stream = opened(file)
        self._seeks = not is_compressed(file)
        self._offset, self._rest = 0, b""  # what was read and not given, and where it stands in the file

    def at(self, position: int) -> bytes:
        """The chunk that begins at this byte of the file's content; empty at its end."""
        self._go_to(position)
        data = self._rest
        if len(data) < CHUNK_BYTES:
            data += self._stream.read(CHUNK_BYTES - len(data))
        while not (end := self.last_end(data)):
            if self.most is not None and len(data) > self.most:
                end = len(data)
                break
            more = self._stream.read(max(CHUNK_BYTES, len(data)))
            if not more:
                end = len(data)
                break
            data += more
        self._offset, self._rest = position + end, data[end:]
        return data[:end]

    def close(self) -> None:
        self._stream.close()

    def _go_to(self, position: int) -> None:
        ahead = position - self._offset
        if 0 <= ahead <= len(self._rest):
            self._offset, self._rest = position, self._rest[ahead:]
            return
        if self._seeks:
            self._stream.seek(position)
        else:
            ahead -= len(self._rest)
            if ahead < 0:
                self._stream.close()
                self._stream, ahead = opened(self.file), position
            while ahead and (skipped := self._stream.read(min(ahead, CHUNK_BYTES))):
                ahead -= len(skipped)
        self._offset, self._rest = position, b""
