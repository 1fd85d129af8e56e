"""Rows of Parquet and Arrow files and of datasets on the disk: a chunk is a row group, a record batch, some rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.table import table_cast

from data.files.joined_columns import open_ipc
from data.files.plain_arrays import plain_column
from data.files.row_chunks import Place, RowChunk, RowReader, TableReader

_ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class TableChunk:
    """Rows of a dataset, decoded when they are read."""

    rows: datasets.Dataset
    first: int
    last: int
    next: Place

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, first: int, last: int) -> list[dict[str, Any]]:
        columns = self.rows[self.first + first : self.first + last]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class SavedReader(RowReader):
    """A dataset that is on the disk, or in memory, as a whole."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        last = min(position + _ROWS_AT_A_TIME, len(self.rows))
        return TableChunk(self.rows, position, last, (last, 0)) if position < last else None

    def close(self) -> None:
        pass


class ParquetReader(TableReader):
    """A Parquet file, by row groups.

    Args:
        features: of the columns to read, joined over all files (`data.files.joined_columns`).
    """

    def __init__(self, file: Path, features: datasets.Features) -> None:
        self.file, self.features = file, features
        self._file = pq.ParquetFile(file)
        self._columns = [name for name in features if name in self._file.schema_arrow.names]

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        if position >= self._file.num_row_groups:
            return None
        return _chunk_of(self._file.read_row_group(position, columns=self._columns), self.features, position + 1)

    def tables(self) -> Iterator[pa.Table]:
        """All rows, some at a time: a row group may be larger than host memory."""
        for batch in self._file.iter_batches(_ROWS_AT_A_TIME, columns=self._columns):
            yield _cast(pa.Table.from_batches([batch]), self.features)

    def close(self) -> None:
        self._file.close()


class ArrowReader(TableReader):
    """An Arrow file or stream, by record batches; it is mapped, so batches that are passed over are not read."""

    def __init__(self, file: Path, features: datasets.Features) -> None:
        self.file, self.features = file, features
        self._map = pa.memory_map(str(file))
        self._batches = open_ipc(self._map)
        self._next_batch = 0  # of a stream

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        batch = self._batch(position)
        if batch is None:
            return None
        batch.validate(full=True)  # offsets that lead outside would end the process
        return _chunk_of(pa.Table.from_batches([batch]), self.features, position + 1)

    def tables(self) -> Iterator[pa.Table]:
        """All rows, a record batch at a time."""
        position = 0
        while (batch := self._batch(position)) is not None:
            batch.validate(full=True)
            yield _cast(pa.Table.from_batches([batch]), self.features)
            position += 1

    def close(self) -> None:
        self._map.close()

    def _batch(self, position: int) -> pa.RecordBatch | None:
        if isinstance(self._batches, pa.RecordBatchFileReader):
            is_there = position < self._batches.num_record_batches
            return self._batches.get_batch(position) if is_there else None
        if position < self._next_batch:
            self._map.seek(0)
            self._batches, self._next_batch = open_ipc(self._map), 0
        try:
            while self._next_batch < position:
                self._batches.read_next_batch()
                self._next_batch += 1
            self._next_batch += 1
            return self._batches.read_next_batch()
        except StopIteration:
            return None


def _cast(table: pa.Table, features: datasets.Features) -> pa.Table:
    """The table with these columns, cast to their types; a column that it lacks is null."""
    schema, columns = features.arrow_schema, []
    for name in features:
        if name in table.column_names:
            columns.append(plain_column(table.column(name)))
        else:
            columns.append(pa.array([None] * table.num_rows, schema.field(name).type))
    table = pa.table(columns, names=list(features)).replace_schema_metadata(table.schema.metadata)
    return table_cast(table, schema)


def _chunk_of(table: pa.Table, features: datasets.Features, following: int) -> TableChunk:
    num_rows = table.num_rows
    rows = datasets.Dataset(datasets.table.InMemoryTable(_cast(table, features)), fingerprint="rows")
    return TableChunk(rows, 0, num_rows, (following, 0))
