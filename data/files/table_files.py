"""Rows of Parquet and Arrow files and of datasets on the disk: a chunk is a row group, a record batch, some rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.table import table_cast

from data.files.row_chunks import Place, RowChunk, RowReader

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


class ParquetReader(RowReader):
    """A Parquet file, by row groups.

    Args:
        columns: to read.
        features: of the first file; others are cast to them.
    """

    def __init__(self, file: Path, columns: Sequence[str], features: datasets.Features) -> None:
        self.columns, self.features = list(columns), features
        self._file = pq.ParquetFile(file)

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        if position >= self._file.num_row_groups:
            return None
        return _chunk_of(self._file.read_row_group(position, columns=self.columns), self.features, position + 1)

    def close(self) -> None:
        self._file.close()


class ArrowReader(RowReader):
    """An Arrow file or stream, by record batches; it is mapped, so batches that are passed over are not read."""

    def __init__(self, file: Path, columns: Sequence[str], features: datasets.Features) -> None:
        self.columns, self.features = list(columns), features
        self._map = pa.memory_map(str(file))
        self._batches = _open_ipc(self._map)
        self._next_batch = 0  # of a stream

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        batch = self._batch(position)
        if batch is None:
            return None
        batch.validate(full=True)  # offsets that lead outside would end the process
        return _chunk_of(pa.Table.from_batches([batch]).select(self.columns), self.features, position + 1)

    def close(self) -> None:
        self._map.close()

    def _batch(self, position: int) -> pa.RecordBatch | None:
        if isinstance(self._batches, pa.RecordBatchFileReader):
            is_there = position < self._batches.num_record_batches
            return self._batches.get_batch(position) if is_there else None
        if position < self._next_batch:
            self._map.seek(0)
            self._batches, self._next_batch = _open_ipc(self._map), 0
        try:
            while self._next_batch < position:
                self._batches.read_next_batch()
                self._next_batch += 1
            self._next_batch += 1
            return self._batches.read_next_batch()
        except StopIteration:
            return None


def features_of(file: Path) -> datasets.Features:
    """The columns of a Parquet or Arrow file, and what the Hugging Face library makes of each."""
    if file.suffix == ".parquet":
        return datasets.Features.from_arrow_schema(pq.read_schema(file))
    with pa.memory_map(str(file)) as mapped:
        return datasets.Features.from_arrow_schema(_open_ipc(mapped).schema)


def _open_ipc(mapped: pa.MemoryMappedFile) -> Any:
    try:
        return pa.ipc.open_stream(mapped)
    except (OSError, pa.ArrowInvalid):
        mapped.seek(0)
        return pa.ipc.open_file(mapped)


def _chunk_of(table: pa.Table, features: datasets.Features, following: int) -> TableChunk:
    wanted = datasets.Features({name: features[name] for name in table.column_names})
    if table.schema != wanted.arrow_schema:
        table = table_cast(table, wanted.arrow_schema)
    rows = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows")
    return TableChunk(rows, 0, table.num_rows, (following, 0))
