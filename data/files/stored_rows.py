"""The rows of Parquet, Arrow and text files as a Hugging Face dataset, which the library keeps once they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from data.files.contents import contents_of
from data.files.row_files import FILE
from data.files.row_stream import RowStream
from utils.errors import ConfigError, in_one_line


def store_rows(rows: RowStream) -> Any:
    """The rows with the columns that they were selected with, and `FILE`, the place of each row's file in the list."""
    builder = StoredRows(
        hash=contents_of(sorted(Path(__file__).parent.glob("*.py"))),
        rows=rows,
        contents=contents_of(rows.files),
    )
    builder.download_and_prepare()
    return builder.as_dataset(split="train")


@dataclass
class StoredRowsConfig(datasets.BuilderConfig):
    rows: RowStream | None = None
    contents: str = ""  # a digest of them: with data_files, the library's key would have their times alone


class StoredRows(datasets.ArrowBasedBuilder):
    """Called by the library; every file is a shard."""

    BUILDER_CONFIG_CLASS = StoredRowsConfig

    def _info(self) -> datasets.DatasetInfo:
        columns = dict(self.config.rows.features or {})
        return datasets.DatasetInfo(features=datasets.Features(columns | {FILE: datasets.Value("int32")}))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        places = list(range(len(self.config.rows.files)))
        return [datasets.SplitGenerator(name="train", gen_kwargs={"places": places})]

    def _generate_tables(self, places: list[int]) -> Iterator[tuple[int, pa.Table]]:
        number, schema = 0, self.info.features.arrow_schema
        for place in places:
            for table in self._tables(place):
                file = pa.array([place] * table.num_rows, pa.int32())
                yield number, pa.table([*table.columns, file], schema=schema)
                number += 1

    def _tables(self, place: int) -> Iterator[pa.Table]:
        try:
            reader = self.config.rows.open_table(place)
            yield from reader.tables()
            reader.close()
        except (pa.ArrowException, OSError) as error:
            file = self.config.rows.files[place]
            raise ConfigError(f"{file} could not be read ({in_one_line(error)})") from error
