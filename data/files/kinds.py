"""The kinds of data files that can be read, by the endings of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.errors import ConfigError

TAR = ".tar"  # WebDataset's shards
TABLES = (
    *(".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    *(".csv", ".tsv", ".parquet", ".arrow", TAR),
)
ALL_KINDS = (*TABLES, ".txt")
JSON = (".json", ".json.gz", ".json.zst")  # which may be one object; .jsonl files are lines
_NO_ROWS = ("dataset_info.json", "dataset_infos.json")
_ONE_READER = {".json": ".jsonl"}  # endings, before the compression's, of files that are read as one dataset


def ending(file: Path) -> str:
    """`.jsonl`, or `.jsonl.gz` of a compressed file."""
    return "".join(file.suffixes[-2:]) if file.suffix in (".gz", ".zst") else file.suffix


def readable(files: Iterable[Path], kinds: Sequence[str]) -> list[Path]:
    """The files of these kinds, less what the hub's repositories say about themselves; sorted."""
    return sorted(file for file in files if ending(file) in kinds and file.is_file() and file.name not in _NO_ROWS)


def one_kind(flag: str, path: str, files: list[Path], kinds: Sequence[str]) -> list[Path]:
    """The files that can be read.

    Args:
        flag: the dataset's name on the command line, for messages. path: where they are, for messages.
        kinds: endings of what can be read.

    Raises:
        ConfigError: if there are none, they are not of one kind, or a name is not UTF-8.
    """
    rows = set(readable(files, kinds))
    found = [file for file in files if file in rows]
    for file in found:
        _check_name(flag, file)
    if not found:
        raise ConfigError(f"--{flag}.data_path: {path} holds no {', '.join(kinds)} file; give files of these kinds")
    if len({_reader(file) for file in found}) > 1:
        endings = ", ".join(sorted({ending(file) for file in found}))
        raise ConfigError(
            f"--{flag}.data_path: {path} holds files of several kinds ({endings}); give one, like *.jsonl"
        )
    return found


def check_kind(flag: str, file: Path, kinds: Sequence[str]) -> None:
    """Refuse a file that cannot be read.

    Raises:
        ConfigError: naming the endings of those that can.
    """
    if ending(file) not in kinds:
        endings = ", ".join(kinds)
        raise ConfigError(f"--{flag}.data_path: {file} ends in none of {endings} (small letters); save it as one")


def _check_name(flag: str, file: Path) -> None:
    """Refuse a file whose name is bytes that no message and no list of files can hold."""
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--{flag}.data_path: the name of {str(file)!r} is not UTF-8; rename it") from error


def _reader(file: Path) -> str:
    first = "." + ending(file).split(".")[1]
    return _ONE_READER.get(first, first)
