"""Rows of text files: lines, paragraphs or whole files, as the Hugging Face library divides them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa

from data.files.byte_chunks import UTF8_MARK, ByteChunks, end_of_lines
from data.files.row_chunks import ItemChunk, RowChunk, TableReader
from data.files.row_text import where_not_utf8
from utils.errors import ConfigError

TEXT = datasets.Features({"text": datasets.Value("string")})
_MARK_OF_FILE = re.compile(b"^" + UTF8_MARK, re.MULTILINE)  # of files that were put together, later ones too
_BETWEEN_PARAGRAPHS = re.compile(rb"\r?\n\r?\n")


class TextReader(TableReader):
    """A row is `{"text": ...}`.

    Args:
        sample_by: `line`, `paragraph` (an empty line is between two) or `document`.
    """

    def __init__(self, file: Path, sample_by: str) -> None:
        self.file, self.sample_by = file, sample_by
        ends = {"line": end_of_lines, "paragraph": _end_of_paragraphs, "document": lambda data: 0}
        self._bytes = ByteChunks(file, ends[sample_by])

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        data = self._bytes.at(position)
        if not data:
            return None
        try:
            text = (_MARK_OF_FILE.sub(b"", data) if UTF8_MARK in data else data).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(where_not_utf8(self.file) or f"{self.file}: {error}") from error
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if self.sample_by == "line":
            rows = text.removesuffix("\n").split("\n")
        elif self.sample_by == "paragraph":
            rows = [part for part in text.split("\n\n") if part]
        else:
            rows = [text]
        return ItemChunk([{"text": row} for row in rows], (position + len(data), 0))

    def tables(self) -> Iterator[pa.Table]:
        """All rows, a chunk at a time."""
        position = 0
        while (chunk := self.chunk(position, 0)) is not None:
            yield pa.Table.from_pylist(list(chunk.read(0, len(chunk))), schema=TEXT.arrow_schema)
            position, _ = chunk.next

    def close(self) -> None:
        self._bytes.close()


def _end_of_paragraphs(data: bytes) -> int:
    end = 0
    for found in _BETWEEN_PARAGRAPHS.finditer(data):
        end = found.end()
    return end
