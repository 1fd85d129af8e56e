"""The keys of the first row of each of several files, so that what only a later file has, or lacks, is known early."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.files.byte_chunks import UTF8_MARK, opened
from data.files.csv_files import CsvReader
from data.files.csv_grammar import Quoting
from data.files.json_of_one_value import may_hold_lines
from data.files.kinds import TAR
from data.files.row_text import RowText
from data.files.tar_files import tar_rows

_HEAD_BYTES = (2**16, 2**20)  # of a file; more of it if its first row is longer
_MOST_FILES = 1000  # that are opened for this before the start


def first_keys(file: Path, quoting: Quoting = "auto") -> list[str]:
    """The columns of a CSV or TSV file, or the keys of the first row of a JSON file.

    Empty if the beginning of the file does not tell; whoever reads it says what is wrong with it.
    """
    if file.suffix in (".csv", ".tsv"):
        reader = CsvReader(file, quoting)
        reader.close()
        return reader.names()
    if file.suffix == TAR:
        return list(next(tar_rows(file), RowText(None)).value or ())
    data = b""
    with opened(file) as stream:
        for num_bytes in _HEAD_BYTES:
            data += stream.read(num_bytes - len(data))
            start = data.removeprefix(UTF8_MARK).decode(errors="ignore").lstrip()
            try:
                row, _ = json.JSONDecoder().raw_decode(start.removeprefix("[").lstrip())
            except (ValueError, RecursionError):
                continue
            is_row = isinstance(row, dict) and (start.startswith("[") or may_hold_lines(file))  # no lists of rows
            return list(row) if is_row else []
    return []


def keys_of_files(files: Sequence[Path], quoting: Quoting = "auto") -> dict[Path, list[str]]:
    """The keys of the first rows of the first thousand files; files that do not tell them are left out."""
    return {file: keys for file in files[:_MOST_FILES] if (keys := first_keys(file, quoting))}


def first_without(files: Sequence[Path], quoting: Quoting = "auto") -> dict[str, Path]:
    """The first file whose first row lacks a column that the first row of another has, by column."""
    keys = keys_of_files(files, quoting) if len(files) > 1 else {}
    columns = dict.fromkeys(column for known in keys.values() for column in known)
    return {
        column: file
        for column in columns
        if (file := next((file for file, known in keys.items() if column not in known), None))
    }
