"""The kinds of data files that can be read, by the endings of their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from utils.errors import ConfigError

TABLES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".csv", ".tsv", ".parquet", ".arrow")
ALL_KINDS = (*TABLES, ".txt")
_ONE_READER = {".json": ".jsonl"}  # endings, before the compression's, of files that are read as one dataset


def ending(file: Path) -> str:
    """`.jsonl`, or `.jsonl.gz` of a compressed file."""
    return "".join(file.suffixes[-2:]) if file.suffix in (".gz", ".zst") else file.suffix


def one_kind(flag: str, path: str, files: list[Path], kinds: Sequence[str]) -> list[Path]:
    """The files that can be read.

    Args:
        flag: the dataset's name on the command line, for messages. path: where they are, for messages.
        kinds: endings of what can be read.

    Raises:
        ConfigError: if there are none, or if they are not of one kind.
    """
    readable = [file for file in files if file.is_file() and ending(file) in kinds]
    if not readable:
        raise ConfigError(f"--{flag}.data_path: {path} holds no {', '.join(kinds)} file; give files of these kinds")
    if len({_reader(file) for file in readable}) > 1:
        endings = ", ".join(sorted({ending(file) for file in readable}))
        raise ConfigError(
            f"--{flag}.data_path: {path} holds files of several kinds ({endings}); give one, like *.jsonl"
        )
    return readable


def check_kind(flag: str, file: Path, kinds: Sequence[str]) -> None:
    """Refuse a file that cannot be read.

    Raises:
        ConfigError: naming the endings of those that can.
    """
    if ending(file) not in kinds:
        endings = ", ".join(kinds)
        raise ConfigError(f"--{flag}.data_path: {file} ends in none of {endings} (small letters); save it as one")


def _reader(file: Path) -> str:
    first = "." + ending(file).split(".")[1]
    return _ONE_READER.get(first, first)
