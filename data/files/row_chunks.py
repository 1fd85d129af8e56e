"""Rows of one file a chunk at a time, from any chunk on. The rows of a chunk are made when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[int, int]
"""Where a chunk begins: its position, as its reader counts (a byte, a row group, a row), and the lines before it."""


class RowChunk(Protocol):
    """Rows that follow each other."""

    @property
    def next(self) -> Place:
        """Where the next chunk begins."""

    def __len__(self) -> int: ...

    def read(self, first: int, last: int) -> Sequence[dict[str, Any] | str]:
        """Some of its rows; a text says what is wrong with a row that cannot be read."""


class RowReader(Protocol):
    """An open file."""

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        """The chunk at a place, (0, 0) or the `next` of another; None at the end of the file."""

    def close(self) -> None: ...


class TableReader(RowReader, Protocol):
    """An open file whose rows all have the same columns."""

    def tables(self) -> Iterator[pa.Table]:
        """All rows, some at a time."""


@dataclass(frozen=True)
class ItemChunk:
    """Rows in memory."""

    items: Sequence[dict[str, Any] | str]
    next: Place

    def __len__(self) -> int:
        return len(self.items)

    def read(self, first: int, last: int) -> Sequence[dict[str, Any] | str]:
        return self.items[first:last]
