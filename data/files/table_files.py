"""Rows of Parquet and Arrow files and of datasets on the disk: a chunk is a row group, a record batch, some rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.table import table_cast

from data.files.joined_columns import open_ipc
from data.files.plain_arrays import bytes_type, plain_column
from data.files.row_chunks import Place, RowChunk, RowReader, TableReader
from data.files.table_rows import read_rows
from data.tokens.spans import BadExample
from utils.errors import ConfigError

_ROWS_AT_A_TIME = 1000


@dataclass(frozen=True)
class TableChunk:
    """Rows of a dataset, decoded when they are read.

    Args:
        place: its file, or what it is called in messages. num_before: rows before those of the dataset.
    """

    place: Path | str
    rows: datasets.Dataset
    first: int
    last: int
    next: Place
    num_before: int = 0

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, first: int, last: int) -> list[dict[str, Any] | str]:
        rows = read_rows(self.rows, self.first + first, self.first + last)
        if isinstance(rows, Mapping):
            return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        number = self.num_before + self.first + first + 1
        return [
            f"{self.place}, row {place}: {row}" if isinstance(row, BadExample) else row
            for place, row in enumerate(rows, number)
        ]


class SavedReader(RowReader):
    """A dataset that is on the disk, or in memory, as a whole.

    Args:
        place: what it is called in messages.
    """

    def __init__(self, rows: datasets.Dataset, place: str) -> None:
        self.rows, self.place = rows, place

    def chunk(self, position: int, num_before: int) -> RowChunk | None:
        last = min(position + _ROWS_AT_A_TIME, len(self.rows))
        return TableChunk(self.place, self.rows, position, last, (last, 0)) if position < last else None

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
        try:
            table = self._file.read_row_group(position, columns=self._columns)
        except pa.ArrowInvalid as error:
            if refusal := self._where_not_utf8():
                raise refusal from error
            raise
        return _chunk_of(self.file, table, self.features, position + 1, num_before)

    def tables(self) -> Iterator[pa.Table]:
        """All rows, some at a time: a row group may be larger than host memory."""
        try:
            for batch in self._file.iter_batches(_ROWS_AT_A_TIME, columns=self._columns):
                yield _cast(pa.Table.from_batches([batch]), self.features)
        except pa.ArrowInvalid as error:
            if refusal := self._where_not_utf8():
                raise refusal from error
            raise

    def _where_not_utf8(self) -> ConfigError | None:
        """The row group with texts of a dictionary that are not UTF-8, of which Arrow reads none; None without one."""
        num_before = 0
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            for name in self._columns:
                try:
                    self._file.read_row_group(group, columns=[name])
                except pa.ArrowInvalid as error:
                    if "UTF8" in str(error):
                        rows = f"rows {num_before + 1:,} to {num_before + num_rows:,}"
                        return ConfigError(f"{self.file}, {rows}: column {name} holds text that is not UTF-8; mend it")
            num_before += num_rows
        return None

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
        return _chunk_of(self.file, self._checked(batch), self.features, position + 1, num_before)

    def tables(self) -> Iterator[pa.Table]:
        """All rows, a record batch at a time."""
        position = 0
        while (batch := self._batch(position)) is not None:
            yield _cast(self._checked(batch), self.features)
            position += 1

    def close(self) -> None:
        self._map.close()

    def _checked(self, batch: pa.RecordBatch) -> pa.Table:
        """The columns that are read. Offsets that lead outside would end the process; texts may be no UTF-8.

        Raises:
            pa.ArrowInvalid: if they are damaged.
        """
        batch = batch.select([name for name in self.features if name in batch.schema.names])
        for column in batch.columns:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                kind = bytes_type(column.type)
                if "UTF8" not in str(error) or kind == column.type:
                    raise
                column.view(kind).validate(full=True)
        return pa.Table.from_batches([batch])

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


def _chunk_of(file: Path, table: pa.Table, features: datasets.Features, following: int, num_before: int) -> TableChunk:
    num_rows = table.num_rows
    rows = datasets.Dataset(datasets.table.InMemoryTable(_cast(table, features)), fingerprint="rows")
    return TableChunk(file, rows, 0, num_rows, (following, num_before + num_rows), num_before)
