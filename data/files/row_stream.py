"""Rows of several files, or of a dataset on the disk, in blocks that can be read again from their places."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa

from data.files.csv_files import CsvReader
from data.files.csv_grammar import Quoting
from data.files.first_keys import first_without, keys_of_files
from data.files.joined_columns import TABLE_ENDINGS, JoinedColumns, join_columns
from data.files.json_files import JsonReader
from data.files.kinds import TAR
from data.files.row_chunks import RowChunk, RowReader, TableReader
from data.files.stored_images import as_stored, with_stored_images
from data.files.table_files import ArrowReader, ParquetReader, SavedReader
from data.files.tar_files import TarReader
from data.files.text_files import TEXT, TextReader
from utils.errors import ConfigError, in_one_line
from utils.file_samples import evenly_spaced_parts

_HEAD_ROWS, _HEAD_CHARACTERS = 256, 2**22  # rows that name the columns, and their size
_SAMPLE_BYTES = 2**12
_NUM_SAMPLES = 16  # of each file, to tell it from another rank's


class RowPlace(NamedTuple):
    """Where a row is."""

    file: int  # its place in the list of files
    position: int  # of its chunk (`data.files.row_chunks.Place`)
    num_before: int
    skip: int  # rows of the chunk before it


@dataclass(frozen=True)
class RowBlock:
    """Rows that follow each other; they are made when they are read."""

    place: RowPlace
    end: RowPlace
    pieces: list[tuple[RowChunk, int, int]]  # a chunk, and its rows [first, last)

    def __len__(self) -> int:
        return sum(last - first for _, first, last in self.pieces)

    def read(self) -> list[dict[str, Any] | str]:
        """The rows; a text says what is wrong with a row that cannot be read."""
        return [row for chunk, first, last in self.pieces for row in chunk.read(first, last)]


@dataclass(frozen=True)
class RowStream:
    """The rows of a split. It can be pickled for a worker process.

    Args:
        files: all of one kind; none for `saved`.
        place: of `saved`, what it is called in messages.
        names: keys under which a JSON object may hold the rows of this split.
        columns: of a table, to read; None: all.
        joined: the columns of Parquet and Arrow files.
        quoting: of CSV and TSV files (`data.files.csv_grammar`).
    """

    files: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    sample_by: str = "line"
    saved: datasets.Dataset | None = None
    columns: tuple[str, ...] | None = None
    joined: JoinedColumns | None = None
    quoting: Quoting = "auto"
    place: str = ""

    @classmethod
    def of_files(
        cls, files: Sequence[Path], names: Sequence[str] = (), *, sample_by: str = "line", quoting: Quoting = "auto"
    ) -> RowStream:
        """The rows of files of one kind.

        Raises:
            ConfigError: if one of Parquet or Arrow cannot be read.
        """
        joined = join_columns(files) if files[0].suffix in TABLE_ENDINGS else None
        return cls(tuple(files), tuple(names), sample_by, joined=joined, quoting=quoting)

    @property
    def features(self) -> datasets.Features | None:
        """The columns of a table that are read; None if each row has keys of its own."""
        if self.saved is not None:
            features = self.saved.features
        elif self.joined is not None:
            features = self.joined.features
        elif self.files[0].suffix == ".txt":
            features = TEXT
        else:
            return None
        return features if self.columns is None else datasets.Features({name: features[name] for name in self.columns})

    @property
    def seeks(self) -> bool:
        """Whether a row can be read without those before it; compressed files cannot."""
        return not any(file.suffix in (".gz", ".zst") for file in self.files)

    def column_names(self) -> list[str]:
        """The columns, or the keys of the first rows of the first file, and of the first row of each other."""
        if self.joined is not None and self.columns is None:
            return self.joined.names()
        if self.features is not None:
            return list(self.features)
        keys: dict[str, None] = {}
        num_characters = 0
        for row in islice(self, _HEAD_ROWS):
            if isinstance(row, Mapping):
                keys |= dict.fromkeys(row)
                num_characters += len(str(row))
            if num_characters > _HEAD_CHARACTERS:
                break
        for keys_of_file in keys_of_files(self.files[1:], self.quoting).values():
            keys |= dict.fromkeys(keys_of_file)
        return list(keys)

    def absent(self) -> dict[str, Path]:
        """The first file that lacks a column, for columns that others have; of JSON files by their first rows."""
        if self.joined is not None:
            return self.joined.absent
        return first_without(self.files, self.quoting) if self.features is None else {}

    def select_columns(self, columns: Sequence[str]) -> RowStream:
        """The same rows with these columns alone; rows with keys of their own keep them."""
        return self if self.features is None else replace(self, columns=tuple(columns))

    def with_stored_images(self) -> RowStream:
        """The same rows with images as they are stored, not decoded."""
        if self.saved is not None:
            return replace(self, saved=with_stored_images(self.saved))
        if self.joined is None:
            return self
        features = {name: as_stored(feature) for name, feature in self.joined.features.items()}
        return replace(self, joined=replace(self.joined, features=datasets.Features(features)))

    def __iter__(self) -> Iterator[dict[str, Any] | str]:
        for rows in self.iter(_HEAD_ROWS):
            yield from rows

    def iter(self, batch_size: int) -> Iterator[list[dict[str, Any] | str]]:
        """The rows, so many at a time."""
        cursor = self.cursor()
        while block := cursor.block(cursor.place, batch_size):
            yield block.read()

    def first_rows(self, most: int) -> Iterator[tuple[Path, list[dict[str, Any] | str]]]:
        """The first row of each of up to `most` files after the first one, evenly spaced; none if a file is empty."""
        others = range(1, len(self.files))
        for number in others[:: max(1, -(-len(others) // most))]:
            yield self.files[number], RowCursor(self, [number]).block(RowPlace(number, 0, 0, 0), 1).read()

    def cursor(self, epoch: int = 0) -> RowCursor:
        """Reads blocks of rows. Files come in another order in each epoch but the first."""
        order = list(range(max(1, len(self.files))))
        if epoch:
            np.random.default_rng(epoch).shuffle(order)
        return RowCursor(self, order)

    def open(self, file: int) -> RowReader:
        """A file, by its place in the list."""
        if self.saved is not None:
            columns = self.saved.column_names if self.columns is None else list(self.columns)
            return SavedReader(self.saved.select_columns(columns), self.place)
        path = self.files[file]
        if self.features is not None:
            return self.open_table(file)
        if path.suffix == TAR:
            return TarReader(path)
        return CsvReader(path, self.quoting) if path.suffix in (".csv", ".tsv") else JsonReader(path, self.names)

    def open_table(self, file: int) -> TableReader:
        """A Parquet, Arrow or text file, by its place in the list."""
        path, features = self.files[file], self.features
        assert features is not None
        if path.suffix == ".txt":
            return TextReader(path, self.sample_by)
        return ParquetReader(path, features) if path.suffix == ".parquet" else ArrowReader(path, features)

    def identity(self) -> list[list[int]]:
        """Size and checksum of each file's beginning and end: another file differs in these."""
        if self.saved is not None:
            return [[len(self.saved), zlib.crc32(self.saved._fingerprint.encode())]]
        return [_identity(file) for file in self.files]

    def fingerprint(self) -> str:
        """The number and size of the files, and a digest of evenly spaced parts of each, in their order.

        Their names are left out: the same data may lie elsewhere on another machine.
        """
        files = self.files if self.saved is None else [Path(file["filename"]) for file in self.saved.cache_files]
        digest, num_bytes = hashlib.sha256(), 0
        for file in files:
            size = file.stat().st_size
            num_bytes += size
            digest.update(f"{size} ".encode())
            for part in evenly_spaced_parts(file, _NUM_SAMPLES, _SAMPLE_BYTES):
                digest.update(part)
        return f"{len(files)}, {num_bytes} bytes, digest {digest.hexdigest()[:12]}"


class RowCursor:
    """Reads a stream's blocks in any order; quickly if they follow each other.

    Args:
        order: of the files, by their places in the list.
    """

    def __init__(self, rows: RowStream, order: Sequence[int]) -> None:
        self.rows = rows
        self._following = dict(pairwise(order))  # the next file, by the place of each in the list
        self.place = RowPlace(order[0], 0, 0, 0)  # after the block that was read last
        self._file, self._at = -1, (-1, -1)
        self._reader: RowReader | None = None
        self._chunk: RowChunk | None = None

    def block(self, place: RowPlace, size: int) -> RowBlock:
        """Up to `size` rows from a place on; fewer at the end of the files."""
        file, position, num_before, skip = place
        pieces: list[tuple[RowChunk, int, int]] = []
        missing = size
        while missing:
            chunk = self._chunk_at(file, position, num_before)
            if chunk is None:
                if file not in self._following:
                    break
                file, position, num_before, skip = self._following[file], 0, 0, 0
                continue
            number = min(missing, len(chunk) - skip)
            if number > 0:
                pieces.append((chunk, skip, skip + number))
                missing, skip = missing - number, skip + number
            if skip >= len(chunk):
                (position, num_before), skip = chunk.next, 0
        self.place = RowPlace(file, position, num_before, skip)
        return RowBlock(place, self.place, pieces)

    def _chunk_at(self, file: int, position: int, num_before: int) -> RowChunk | None:
        try:
            if file != self._file or self._reader is None:
                if self._reader is not None:
                    self._reader.close()
                self._file, self._reader, self._at = file, self.rows.open(file), (-1, -1)
            if self._at != (file, position):
                self._at, self._chunk = (file, position), self._reader.chunk(position, num_before)
        except (pa.ArrowException, OSError) as error:
            if not self.rows.files:
                raise
            raise ConfigError(f"{self.rows.files[file]} could not be read ({in_one_line(error)})") from error
        return self._chunk


def _identity(file: Path) -> list[int]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(_SAMPLE_BYTES)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        return [size, zlib.crc32(stream.read(), zlib.crc32(start))]
