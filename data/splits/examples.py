"""The examples of one split, with the columns that a dataset function asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from data.files.json_values import with_spelling
from data.files.row_files import PROBLEM, ROW
from data.files.table_rows import Batch, read_rows
from data.sequences.token_columns import weight_of
from data.splits.known_columns import columns_there
from data.splits.learned_columns import refuse_unlearned
from data.splits.optional_columns import MEDIA_COLUMNS, is_nan, text_of
from data.splits.stored_values import AsWritten
from data.tokens.spans import BadExample
from utils.errors import ConfigError
from utils.printing import print_line
from utils.progress import shows_progress

REMEDY = "mend it, or leave such rows out with --skip_bad_rows"
_ROWS_AT_A_TIME = 1000
_decode = json.JSONDecoder().raw_decode  # json.loads without its checks, which the text has passed


@dataclass(frozen=True)
class SplitExamples:
    """The examples of a split, with the columns that a dataset function asked for, and what messages call them."""

    data: Any  # datasets.Dataset: columns, or rows as text; of a stream RowStream or datasets.IterableDataset
    flag: str  # that named the place: "--samsum_dataset.data_path"
    place: str  # file, folder, glob or name on the hub
    columns: tuple[str, ...]  # that are there; of a stream of rows as text, those of its first rows
    all_columns: tuple[str, ...]  # of the place, for messages
    text_columns: tuple[str, ...]  # must hold text in every example
    learns_empty_answers: bool = False
    splits_special_tokens: bool = True  # special tokens that the data spells stay text
    masks_prompts: bool = True
    row_numbers: np.ndarray | None = None  # int64 [examples], rows of the place; None: 0, 1, 2, ...
    rows_by_file: tuple[tuple[str, int], ...] = ()  # files, and how many of the rows each has; empty: not known
    later_columns: tuple[str, ...] = ()  # of a stream: asked for, and not in its first rows; a later row may have them
    learned_columns: tuple[str, ...] = ()  # that may say that a row is not learned (`data.splits.learned_columns`)
    weight_column: str | None = None  # what a row's loss is multiplied by
    absent: Mapping[str, Path] = field(default_factory=dict)  # columns that not all files have, and one that lacks it
    as_written: AsWritten = field(default_factory=dict)  # by column: makes of a stored value what was written
    skips_bad_rows: bool = False
    is_training: bool = True
    reads_images: bool = False  # for a model of image and text

    @property
    def name(self) -> str:
        return f"{self.flag}: {self.place}"

    @property
    def columns_there(self) -> str:
        """All columns of the place, and which dataset reads such, for messages."""
        return columns_there(self.all_columns, self.flag.removeprefix("--").partition(".")[0])

    def row_number(self, index: int) -> int:
        """The row of an example in its place, from 1, counted over all files in their order."""
        return 1 + int(index if self.row_numbers is None else self.row_numbers[index])

    def where(self, index: int) -> str:
        """The place and the number of a row, for messages; of several files also the file, and its number there."""
        number = number_in_file = self.row_number(index)
        for file, num_rows in self.rows_by_file if len(self.rows_by_file) > 1 else ():
            if number_in_file <= num_rows:
                return f"{self.place}, row {number} (row {number_in_file} of {file})"
            number_in_file -= num_rows
        return f"{self.place}, row {number}"

    def with_columns(self, *columns: str | None) -> SplitExamples:
        """These examples, once it is known which of the columns asked for are used: the others are not read."""
        used = {*self.learned_columns, *(column for column in (*columns, self.weight_column) if column)}
        return replace(
            self,
            columns=tuple(column for column in self.columns if column in used),
            text_columns=tuple(column for column in self.text_columns if column in used),
            later_columns=tuple(column for column in self.later_columns if column in used),
        )

    def rows_of(self, batch: Batch) -> Iterator[dict[str, Any] | BadExample]:
        """The examples of a batch of `data`, each with all its columns: None where a row has none."""
        if not isinstance(batch, Mapping):
            for row in batch:
                if isinstance(row, BadExample):
                    yield row
                else:
                    yield UnreadableRow(row) if isinstance(row, str) else self._columns_of(row)
        elif ROW in batch and PROBLEM in batch:
            for text, problem in zip(batch[ROW], batch[PROBLEM], strict=True):
                yield (
                    UnreadableRow(problem) if text is None else self._columns_of(with_spelling(text, _decode(text)[0]))
                )
        else:
            columns = [batch[name] for name in self.columns]
            for values in zip(*columns, strict=True):
                yield self._as_written(dict(zip(self.columns, values, strict=True)))

    def _columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        example = {name: row.get(name) for name in self.columns}
        for name in self.later_columns:
            if name in row:
                example[name] = row[name]
        return self._as_written(example)

    def _as_written(self, example: dict[str, Any]) -> dict[str, Any]:
        for name, read in self.as_written.items():
            if name in example:
                example[name] = read(example[name])
        return example

    def with_text(self, example: dict[str, Any]) -> dict[str, Any]:
        """The example with text in its text columns: a number as it is written.

        Raises:
            BadExample: if a column holds anything else, or one says that the row is not to be learned.
        """
        for name in self.learned_columns:
            refuse_unlearned(name, example.pop(name, None))
        for name in self.text_columns:
            value = None if is_nan(example[name]) else example[name]
            if isinstance(value, int | float) and not isinstance(value, bool):
                example[name] = text_of(name, value)
            elif not isinstance(value, str):
                kind = "empty" if value is None else f"not text but {type(value).__name__}"
                raise BadExample(f"column {name} is {kind}")
        return example

    def take_weight(self, example: dict[str, Any]) -> float:
        """The weight of an example, which then no longer has the column; 1 if there is no such column.

        Raises:
            BadExample: if it is no number of at least 0.
        """
        if self.weight_column is None:
            return 1.0
        return weight_of(self.weight_column, example.pop(self.weight_column, None))

    def numbered(self) -> Iterator[tuple[int, dict[str, Any] | BadExample]]:
        """The examples with their places here, from 0."""
        yield from enumerate(row for batch in self._batches() for row in self.rows_of(batch))

    def _batches(self) -> Iterator[Batch]:
        if isinstance(self.data, datasets.Dataset):
            for first in range(0, len(self.data), _ROWS_AT_A_TIME):
                yield read_rows(self.data, first, first + _ROWS_AT_A_TIME)
        else:
            yield from self.data.iter(_ROWS_AT_A_TIME)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The examples.

        Raises:
            ConfigError: for a row that cannot be read, unless such rows are skipped.
        """
        for index, row in self.numbered():
            if isinstance(row, BadExample):
                self.refusal(index, row)
            else:
                yield row

    def refuse_absent(self, columns: Iterable[str]) -> None:
        """Refuse a file without one of the columns, which every row must have; unless such rows are skipped.

        Raises:
            ConfigError: naming the file.
        """
        column = next((column for column in columns if column in self.absent), None)
        if column is not None and not self.skips_bad_rows:
            raise ConfigError(
                f"{self.flag}: {self.absent[column]} has nothing in column {column}, and other files have; {REMEDY}"
            )

    def say_unread(self) -> None:
        """Name the columns of the training data that no one reads; images and sound are at most looked for."""
        unread = [
            name
            for name in self.all_columns
            if name not in self.columns or self._is_looked_for(name) or name in self.learned_columns
        ]
        if unread and self.is_training and shows_progress():
            names = ", ".join(name or "one without a name" for name in unread)
            print_line(f"{self.name}: columns that are not read: {names}")

    def _is_looked_for(self, name: str) -> bool:
        """Whether a column is read to refuse what it holds."""
        return name in MEDIA_COLUMNS and not (self.reads_images and name in ("image", "images"))

    def say_unread_keys(self, keys: Sequence[str]) -> None:
        """Name keys of turns that no one reads."""
        if keys:
            print_line(f"{self.name}: keys of turns that are not read, so what they say is lost: {', '.join(keys)}")

    def refusal(self, index: int, problem: BadExample) -> str:
        """The message for an example that is left out because it cannot be used.

        Raises:
            ConfigError: unless such examples are skipped.
        """
        row = "" if isinstance(problem, UnreadableRow) else f" {self.where(index)}:"
        refusal = f"{self.flag}:{row} {problem}"
        if not self.skips_bad_rows:
            raise ConfigError(f"{refusal}; {REMEDY}") from problem
        return refusal


class UnreadableRow(BadExample):
    """A row of a file that could not be read; its text names file and line."""
