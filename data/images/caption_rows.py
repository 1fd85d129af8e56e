"""Captions as tokens, and where the image of each is: images stay on disk until a batch is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import numpy as np

from data.files.kinds import TABLES
from data.files.table_rows import read_rows
from data.images.opening import ImageSource, image_source, name_of, open_image, read_size
from data.images.shapes import RefusalOf, Size, refused_sizes
from data.splits.data_path import locate
from data.splits.examples import SplitExamples
from data.splits.files import Files
from data.splits.reading import holds_text
from data.tokens.spans import BadExample
from utils.errors import ConfigError
from utils.printing import print_line
from utils.progress import phase, shows_progress
from utils.wording import plural

_THREADS = 16  # that wait for files, most of the time
_CHECKED_AT_A_TIME = 4096


class CheckedImages(NamedTuple):
    """The rows of a split, as far as headers of their images tell."""

    is_unusable: np.ndarray  # bool [rows]
    sizes: list[Size]  # of each row's image; (0, 0) if it has none that can be read


class Picture(NamedTuple):
    """An image, decoded, and what the model is asked about it."""

    image: Any  # PIL.Image
    prompt: str


@dataclass(frozen=True)
class Pictures:
    """The images of a split by their place in it, and their prompts."""

    examples: SplitExamples  # with the columns of images and prompts
    image_column: str
    prompt_column: str | None
    prompt: str  # if there is no such column
    folder: Path | None  # that relative paths start from

    def __len__(self) -> int:
        return len(self.examples.data)

    def example(self, index: int) -> dict[str, Any]:
        """The row at this place.

        Raises:
            BadExample: if it cannot be read.
        """
        (row,) = self.examples.rows_of(read_rows(self.examples.data, index, index + 1))
        if isinstance(row, BadExample):
            raise row
        return row

    def open(self, index: int) -> Picture:
        """The image at this place, decoded.

        Raises:
            BadExample: if it cannot be.
        """
        return Picture(open_image(self._source(index)), self.prompt_of(index))

    def describe(self, index: int, error: BadExample) -> str:
        """The message for a row whose image turns out broken when its batch is made."""
        return f"{self.examples.flag}: {self.examples.where(index)}: {error}; mend it, or take the row out"

    def prompt_of(self, index: int) -> str:
        """What the model is asked about the image at this place.

        Raises:
            BadExample: if the row cannot be read.
        """
        return str(self.example(index)[self.prompt_column]) if self.prompt_column else self.prompt

    def check(
        self,
        refusal_of: RefusalOf,
        refusal_of_prompt: Callable[[str], str | None] = lambda prompt: None,
        other_refusals: Mapping[int, str] = MappingProxyType({}),
    ) -> CheckedImages:
        """Which images are not there, have no header that can be read, or a shape or prompt that the processor refuses.

        Pixels are not decoded.

        Args:
            other_refusals: what else is wrong, by the row's place here.

        Raises:
            ConfigError: for the first such image, unless such rows are skipped.
        """
        is_unusable, sizes = np.zeros(len(self), dtype=bool), [(0, 0)] * len(self)

        def leave_out(index: int, error: BadExample) -> None:
            refusal = self.examples.refusal(index, error)
            if not is_unusable.any() and shows_progress():
                print_line(f"left out: {refusal}")
            is_unusable[index] = True

        if self.prompt_column is None and (reason := refusal_of_prompt(self.prompt)):
            raise ConfigError(f"{self.examples.flag.partition('.')[0]}.prompt: {reason}; take that out")
        for index, reason in {**self._refused_prompts(refusal_of_prompt), **other_refusals}.items():
            leave_out(index, BadExample(reason))
        rows_of_size: dict[Size, list[int]] = {}
        places = iter(range(len(self)))
        with (
            phase(f"checking {plural(len(self), 'image')} of {self.examples.place}"),
            ThreadPoolExecutor(_THREADS) as pool,
        ):
            while some := list(islice(places, _CHECKED_AT_A_TIME)):
                for index, size in zip(some, pool.map(self._size, some), strict=True):
                    if isinstance(size, BadExample):
                        leave_out(index, size)
                    else:
                        sizes[index] = size
                        rows_of_size.setdefault(size, []).append(index)
            refused = refused_sizes(rows_of_size, refusal_of)
        reasons = {index: (size, reason) for size, reason in refused.items() for index in rows_of_size[size]}
        for index, ((width, height), reason) in sorted(reasons.items()):
            name = name_of(self._source(index))
            leave_out(index, BadExample(f"the processor refuses image {name}, {width} x {height} pixels ({reason})"))
        if (num_left_out := int(is_unusable.sum())) > 1 and shows_progress():
            print_line(f"left out: {plural(num_left_out, 'row')} in all whose images cannot be used")
        return CheckedImages(is_unusable, sizes)

    def _refused_prompts(self, refusal_of_prompt: Callable[[str], str | None]) -> dict[int, str]:
        if self.prompt_column is None:
            return {}
        rows = ((index, row) for index, row in self.examples.numbered() if not isinstance(row, BadExample))
        reasons = ((index, refusal_of_prompt(str(row[self.prompt_column]))) for index, row in rows)
        return {index: reason for index, reason in reasons if reason}

    def _size(self, index: int) -> Size | BadExample:
        try:
            return read_size(self._source(index))
        except BadExample as error:
            return error

    def _source(self, index: int) -> ImageSource:
        return image_source(self.example(index)[self.image_column], f"column {self.image_column}", self.folder)


@dataclass(frozen=True)
class CaptionRows:
    """The rows of a caption dataset: tokens (`input_ids`, `labels`) and pictures, in the same order."""

    tokens: Any  # datasets.Dataset
    pictures: Pictures

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.tokens)


def undecoded(examples: SplitExamples, column: str) -> SplitExamples:
    """The examples with the images of this column as they are stored; the library would decode each that is read."""
    data = examples.data
    if not holds_text(data) and isinstance(data.features[column], datasets.Image):
        data = data.cast_column(column, datasets.Image(decode=False))
    return replace(examples, data=data)


def text_alone(examples: SplitExamples, image_column: str, *columns: str) -> SplitExamples:
    """The examples with these columns alone, so that tokenizing reads no image."""
    others = tuple(column for column in examples.all_columns if column != image_column)
    examples = replace(examples.with_columns(*columns), all_columns=others)
    return examples if holds_text(examples.data) else replace(examples, data=examples.data.select_columns([*columns]))


def folder_of_paths(flag: str, dataset_config: Any, split: str) -> Path | None:
    """The folder of a split's files, from which paths in them start; None if they are of several, or no files."""
    place = locate(flag, dataset_config, None, TABLES)
    if not isinstance(place, Files):
        return None
    files = place.files_of(split if place.has_split(split) else dataset_config.train_split)
    folders = {file.parent for file in files}
    return folders.pop() if len(folders) == 1 else None
