"""The columns of several Parquet or Arrow files as one dataset: types are joined, or the two files that differ named.

A column that some files lack is null there, as a key is that some rows of a JSON file lack. Nothing is cast between
text and numbers: 007 in one file and 7 in another are not the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from data.files.plain_arrays import plain_type
from utils.errors import ConfigError, in_one_line

TABLE_ENDINGS = (".parquet", ".arrow")

_THREADS = 16  # that wait for the footers of files
_NULL = datasets.Value("null")
_WIDER = (
    ("int8", "int16", "int32", "int64"),
    ("uint8", "uint16", "uint32", "uint64"),
    ("float16", "float32", "float64"),
    ("string", "large_string"),
    ("binary", "large_binary"),
)
_WITHIN_INT64 = {*_WIDER[0], *_WIDER[1][:-1]}


@dataclass(frozen=True)
class JoinedColumns:
    """The columns of some files.

    Args:
        features: by name, of those that can be read, joined over all files.
        refusals: why the others cannot.
        absent: the first file that lacks a column, by name; none for those that all files have.
        num_rows: of each file.
    """

    features: datasets.Features
    refusals: dict[str, str]
    absent: dict[str, Path]
    num_rows: tuple[int, ...]

    def names(self) -> list[str]:
        return [*self.features, *self.refusals]


class _Column(NamedTuple):
    feature: Any
    file: Path  # that gave its type


class _Table(NamedTuple):
    schema: pa.Schema
    num_rows: int


class _DifferError(Exception):
    """Two types of one column that cannot be joined: `where` leads to them in it."""

    def __init__(self, one: Any, other: Any, where: str = "") -> None:
        super().__init__(where)
        self.one, self.other, self.where = one, other, where


def join_columns(files: Sequence[Path]) -> JoinedColumns:
    """The columns of Parquet or Arrow files, in the order in which they come first.

    Raises:
        ConfigError: if a file cannot be read.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        tables = list(pool.map(_read_table, files))
    columns: dict[str, _Column] = {}
    refusals: dict[str, str] = {}
    for number, (file, table) in enumerate(zip(files, tables, strict=True)):
        if number and table.schema.equals(tables[number - 1].schema, check_metadata=True):
            continue
        for name in table.schema.names:
            if name not in refusals and (refusal := _join(columns, name, file, table.schema)):
                refusals[name] = refusal
    features = datasets.Features({name: column.feature for name, column in columns.items() if name not in refusals})
    lacking = {name: _first_without(name, files, tables) for name in features}
    absent = {name: file for name, file in lacking.items() if file is not None}
    return JoinedColumns(features, refusals, absent, tuple(table.num_rows for table in tables))


def open_ipc(mapped: pa.MemoryMappedFile) -> Any:
    """A reader of an Arrow stream or file."""
    try:
        return pa.ipc.open_stream(mapped)
    except (OSError, pa.ArrowInvalid):
        mapped.seek(0)
        return pa.ipc.open_file(mapped)


def _read_table(file: Path) -> _Table:
    try:
        if file.suffix == ".parquet":
            metadata = pq.read_metadata(file)
            if _is_two_files(file, metadata):
                raise ConfigError(f"{file} holds another file before its rows, as two files put together do")
            return _Table(metadata.schema.to_arrow_schema(), metadata.num_rows)
        with pa.memory_map(str(file)) as mapped:
            reader = open_ipc(mapped)
            if isinstance(reader, pa.RecordBatchFileReader):
                sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
            else:
                sizes = [batch.num_rows for batch in reader]
                if mapped.tell() < mapped.size():
                    raise ConfigError(f"{file} goes on after the end of its rows, as two files put together do")
            return _Table(reader.schema, sum(sizes))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file} could not be read ({in_one_line(error)})") from error


def _is_two_files(file: Path, metadata: pq.FileMetaData) -> bool:
    """Whether a Parquet file follows another in one file: the places of its rows then lead into the other's."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    end = max((start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)), default=0)
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as mapped:
        return mapped.find(b"PAR1PAR1", end) >= 0


def _join(columns: dict[str, _Column], name: str, file: Path, schema: pa.Schema) -> str:
    """Add a file's column to those of the files before; what is wrong if it cannot be."""
    if Counter(schema.names)[name] > 1:
        return f"{file} has the column {name} twice; rename one"
    field = schema.field(name)
    try:
        feature = _feature_of(pa.field(name, plain_type(field.type)), field, schema.metadata)
    except ValueError:  # the library has no name for it
        return f"{file} has the column {name} as {field.type}, which cannot be read; write it as JSON text"
    before = columns.setdefault(name, _Column(feature, file))
    try:
        joined = _joined(before.feature, feature)
    except _DifferError as differ:
        return (
            f"column {name}{differ.where} is {_name_of(differ.one)} in {before.file} and {_name_of(differ.other)} in "
            f"{file}; give it one type in all files"
        )
    columns[name] = _Column(joined, file if before.feature == _NULL else before.file)
    return ""


def _feature_of(field: pa.Field, as_written: pa.Field, metadata: Any) -> Any:
    """What the library makes of a column; its own metadata say more than the type: an image, the names of classes."""
    schema = pa.schema([as_written if field.type == as_written.type else field], metadata=metadata)
    return datasets.Features.from_arrow_schema(schema)[field.name]


def _first_without(name: str, files: Sequence[Path], tables: Sequence[_Table]) -> Path | None:
    """The first file with rows that lacks a column, or has nothing but nulls in it by its type."""
    for file, table in zip(files, tables, strict=True):
        index = table.schema.get_field_index(name)
        if table.num_rows and (index < 0 or pa.types.is_null(table.schema.field(index).type)):
            return file
    return None


def _joined(one: Any, other: Any) -> Any:
    """A type that holds the values of both.

    Raises:
        _DifferError: if there is none that leaves them as they are.
    """
    if one == other or other == _NULL:
        return one
    if one == _NULL:
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _inside(f".{name}", one.get(name, _NULL), other.get(name, _NULL)) for name in {**one, **other}}
    lists = (datasets.List, datasets.LargeList)
    if isinstance(one, lists) and isinstance(other, lists):
        inner = _inside("[]", one.feature, other.feature)
        is_large = isinstance(one, datasets.LargeList) or isinstance(other, datasets.LargeList)
        return datasets.LargeList(inner) if is_large else datasets.List(inner)
    if isinstance(one, datasets.Value) and isinstance(other, datasets.Value):
        both = {one.dtype, other.dtype}
        if dtypes := next((dtypes for dtypes in _WIDER if both <= {*dtypes}), None):
            return datasets.Value(max(both, key=dtypes.index))
        if both <= _WITHIN_INT64:
            return datasets.Value("int64")
    media = (datasets.Image, datasets.Audio, datasets.Video)
    for medium, stored in ((one, other), (other, one)):  # a file may lack the library's metadata
        if isinstance(medium, media) and isinstance(stored, dict) and {*stored} == {"bytes", "path"}:
            return medium
    raise _DifferError(one, other)


def _inside(where: str, one: Any, other: Any) -> Any:
    try:
        return _joined(one, other)
    except _DifferError as differ:
        raise _DifferError(differ.one, differ.other, where + differ.where) from None


def _name_of(feature: Any) -> str:
    if isinstance(feature, datasets.Value):
        return str(feature.dtype)
    if isinstance(feature, datasets.ClassLabel):
        return f"classes ({', '.join(feature.names)})"
    return "struct" if isinstance(feature, dict) else type(feature).__name__.lower()
