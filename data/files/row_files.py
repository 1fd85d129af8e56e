"""JSON, CSV and TSV files as a Hugging Face dataset of rows that are still text.

The library keeps the rows once read, and holds the lock of the process that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from data.files import csv_files, json_files
from data.files.contents import contents_of
from data.files.csv_grammar import Quoting
from data.files.kinds import TAR
from data.files.row_text import RowText
from data.files.tar_files import tar_rows

ROW, NEW_KEYS, PROBLEM = "row", "new_keys", "problem"
FILE = "\x1ffile"  # a name that no column of a user's has
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".csv", ".tsv", TAR)
_ROWS_AT_A_TIME = 4096
_CHARACTERS_AT_A_TIME = 2**24
_SEPARATOR = "\x1f"
_FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in (ROW, NEW_KEYS, PROBLEM)} | {FILE: datasets.Value("int32")}
)
_SCHEMA = _FEATURES.arrow_schema  # which would take as long to make as a small table


def read_row_files(files: Sequence[Path], names: Sequence[str], quoting: Quoting = "auto") -> Any:
    """Rows as text: `row` is JSON, or null and `problem` says why; `new_keys` are those that no row of the file had
    before; `FILE` is the file's place in the list.

    Args:
        names: keys under which a JSON object may hold the rows of this split.
    """
    builder = RowFiles(
        hash=contents_of(sorted(Path(__file__).parent.glob("*.py"))),
        paths=tuple(map(str, files)),
        names=tuple(names),
        contents=contents_of(files),
        quoting=quoting,
    )
    builder.download_and_prepare()
    return builder.as_dataset(split="train")


def keys_of(new_keys: Sequence[str | None]) -> list[str]:
    """The keys of all rows, in the order in which they come first."""
    return list(dict.fromkeys(key for keys in new_keys if keys for key in keys.split(_SEPARATOR)))


@dataclass
class RowFilesConfig(datasets.BuilderConfig):
    paths: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    contents: str = ""  # a digest of them: with data_files, the library's key would have their times alone
    quoting: Quoting = "auto"


class RowFiles(datasets.ArrowBasedBuilder):
    """Called by the library; every file is a shard."""

    BUILDER_CONFIG_CLASS = RowFilesConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=_FEATURES)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        places = list(range(len(self.config.paths)))
        return [datasets.SplitGenerator(name="train", gen_kwargs={"places": places})]

    def _generate_tables(self, places: list[int]) -> Iterator[tuple[int, pa.Table]]:
        number = 0
        for place in places:
            file, seen = Path(self.config.paths[place]), set[str]()
            rows = self._rows(file)
            while block := _block(rows):
                yield number, _table(block, seen, place)
                number += 1

    def _rows(self, file: Path) -> Iterator[RowText]:
        if file.suffix in (".csv", ".tsv"):
            return csv_files.csv_rows(file, self.config.quoting)
        if file.suffix == TAR:
            return tar_rows(file)
        return json_files.json_rows(file, self.config.names)


def _block(rows: Iterator[RowText]) -> list[RowText]:
    """The next rows: not many, and few if they are long, for a block is in memory as a whole."""
    block, num_characters = [], 0
    for row in islice(rows, _ROWS_AT_A_TIME):
        block.append(row)
        num_characters += len(row.text or "")
        if num_characters > _CHARACTERS_AT_A_TIME:
            break
    return block


def _table(rows: Sequence[RowText], seen: set[str], place: int) -> pa.Table:
    new_keys: list[str | None] = []
    for row in rows:
        keys = row.value or ()
        if seen.issuperset(keys):
            new_keys.append(None)
        else:
            new_keys.append(_SEPARATOR.join(key for key in keys if key not in seen))
            seen.update(keys)
    columns = {ROW: [row.text for row in rows], NEW_KEYS: new_keys, PROBLEM: [row.problem for row in rows]}
    return pa.table(columns | {FILE: [place] * len(rows)}, schema=_SCHEMA)
