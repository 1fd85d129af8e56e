"""The keys of the first row of each of several files, so that what only a later file has, or lacks, is known early."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.files.byte_chunks import UTF8_MARK, opened
from data.files.csv_files import CsvReader
from data.files.csv_grammar import Quoting
from data.files.json_files import may_hold_lines

_HEAD_BYTES = 2**20


def first_keys(file: Path, quoting: Quoting = "auto") -> list[str]:
    """The columns of a CSV or TSV file, or the keys of the first row of a JSON file.

    Empty if the beginning of the file does not tell; whoever reads it says what is wrong with it.
    """
    if file.suffix in (".csv", ".tsv"):
        reader = CsvReader(file, quoting)
        reader.close()
        return reader.names()
    with opened(file) as stream:
        start = stream.read(_HEAD_BYTES).removeprefix(UTF8_MARK).decode(errors="ignore").lstrip()
    try:
        row, _ = json.JSONDecoder().raw_decode(start.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return []
    is_row = isinstance(row, dict) and (start.startswith("[") or may_hold_lines(file))  # no object with lists of rows
    return list(row) if is_row else []


def first_without(files: Sequence[Path], quoting: Quoting = "auto") -> dict[str, Path]:
    """The first file whose first row lacks a column that the first row of another has, by column."""
    keys = {file: known for file in files if (known := first_keys(file, quoting))} if len(files) > 1 else {}
    columns = dict.fromkeys(column for known in keys.values() for column in known)
    return {
        column: file
        for column in columns
        if (file := next((file for file, known in keys.items() if column not in known), None))
    }
