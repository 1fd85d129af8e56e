"""Opens the rows of one split, and says in one line what is wrong with files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import xxhash

from data.cache_folder import not_kept
from data.files.contents import contents_of
from data.files.csv_grammar import Quoting
from data.files.kinds import ending
from data.files.row_files import ENDINGS, read_row_files
from data.files.row_stream import RowStream
from data.splits.data_path import Hub, Place, Saved
from data.splits.files import Files
from data.splits.names import names_of
from utils.errors import ConfigError, in_one_line
from utils.hub import check_on_hub


def open_rows(name: str, place: Place, split: str, *, streams: bool, quoting: Quoting = "auto", **options: Any) -> Any:
    """The rows of a split.

    Args:
        name: the flag and the place, for messages.
        quoting: of CSV and TSV files.
        options: passed to the reader of files.

    Returns:
        A `datasets.Dataset`, or an IterableDataset of the hub's; of files to stream, and of Parquet, Arrow and text
        files, a `RowStream`: those are stored once it is known which columns are asked for.

    Raises:
        ConfigError: if they cannot be read.
    """
    if isinstance(place, Hub):
        check_on_hub(f"--{place.flag}.data_path", place.name, "dataset")
    files = place.files_of(split) if isinstance(place, Files) else []
    for file in files:
        if file.stat().st_size == 0:
            raise ConfigError(f"--{place.flag}.data_path: {file} is empty")
    with errors_in_one_line(name, place):
        if isinstance(place, Hub):
            return datasets.load_dataset(place.name, place.config, split=split, streaming=streams)
        if isinstance(place, Saved):
            data = place.rows_of(split)
            return RowStream(saved=data, place=str(place)) if streams else with_contents(data)
        names = names_of(split, is_default=True)
        if ending(files[0]) in ENDINGS and not streams:
            return read_row_files(files, names, quoting)
        rows = RowStream.of_files(files, names, quoting=quoting, **options)
        if streams and rows.joined is None:
            refuse_empty(name, rows)  # and a file that cannot be read, now and not in a worker
        return rows


def with_contents(data: datasets.Dataset) -> datasets.Dataset:
    """The same rows, told from others by what their files hold: these may be written over below a state.json."""
    files = [Path(file["filename"]) for file in data.cache_files]
    fingerprint = xxhash.xxh3_64_hexdigest(f"{data._fingerprint} {contents_of(files)}".encode())
    return data.select(range(len(data)), new_fingerprint=fingerprint)


def refuse_empty(name: str, rows: RowStream) -> None:
    """Read the first row.

    Raises:
        ConfigError: if there is none.
    """
    if next(iter(rows), None) is None:
        raise no_rows(name)


def no_rows(name: str) -> ConfigError:
    return ConfigError(f"{name} holds no rows")


@contextmanager
def errors_in_one_line(name: str, place: Place) -> Iterator[None]:
    """What goes wrong inside, as a ConfigError that names the place."""
    flag = f"--{place.flag}.data_path"
    try:
        yield
    except Exception as error:
        found = error if isinstance(error, ConfigError) else error.__cause__
        if isinstance(found, ConfigError):
            raise ConfigError(str(found) if str(found).startswith("--") else f"{flag}: {found}") from error
        if refusal := not_kept(error):
            raise refusal from error
        if isinstance(place, Hub) and "Unknown split" in str(error):
            raise ConfigError(
                f"{name}: {' '.join(str(error).split())}; name one with --{place.flag}.train_split or .test_split, or "
                f"evaluate on a share of the training rows with --{place.flag}.validation_fraction 0.05"
            ) from error
        reason = in_one_line(error.__cause__ or error) or type(error).__name__
        if "corresponds to no data" in reason:  # the library's words for blank lines, or a header alone
            raise no_rows(name) from error
        raise ConfigError(f"{name} could not be read ({reason}); check it, or give another with {flag}") from error
