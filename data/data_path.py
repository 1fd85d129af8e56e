"""What `--NAME.data_path` means: files, a `save_to_disk` folder or a name on the hub; and which splits are there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, glob, has_magic
from pathlib import Path
from typing import Any

import datasets

from configs.datasets import DataSource
from utils.errors import ConfigError, in_one_line

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
TABLES = (".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Files:
    """Files by split; files without a split are training data."""

    flag: str
    path: str
    by_split: dict[str, list[Path]]
    has_splits: bool

    def __str__(self) -> str:
        return self.path

    def has_split(self, split: str) -> bool:
        return split in self.by_split

    def files_of(self, split: str) -> list[Path]:
        """The files of a split.

        Raises:
            ConfigError: if there are none.
        """
        if split in self.by_split:
            return self.by_split[split]
        if self.has_splits:
            there = ", ".join(file.name for files in self.by_split.values() for file in files)
            raise ConfigError(
                f"--{self.flag}.data_path: {self.path} needs {split}{{{','.join(READERS)}}}, and has {there}; name the "
                f"splits that are there with --{self.flag}.train_split and .test_split"
            )
        raise ConfigError(_no_validation(self.flag, self.path))


@dataclass(frozen=True)
class Saved:
    """A `save_to_disk` folder: splits by name, or one dataset, which is training data."""

    flag: str
    path: str
    data: Any  # datasets.Dataset or DatasetDict
    train_split: str

    def __str__(self) -> str:
        return self.path

    @property
    def has_splits(self) -> bool:
        return isinstance(self.data, dict)

    def has_split(self, split: str) -> bool:
        return split in self.data if self.has_splits else split == self.train_split

    def rows_of(self, split: str) -> Any:
        """The rows of a split.

        Raises:
            ConfigError: if there are none.
        """
        if not self.has_split(split) and self.has_splits:
            raise ConfigError(
                f"--{self.flag}.data_path: {self.path} has no split {split}; it has {', '.join(self.data)}: name one "
                f"with --{self.flag}.train_split or .test_split"
            )
        if not self.has_split(split):
            raise ConfigError(_no_validation(self.flag, self.path))
        return self.data[split] if self.has_splits else self.data


@dataclass(frozen=True)
class Hub:
    """A dataset on the hub."""

    flag: str
    name: str
    config: str | None

    def __str__(self) -> str:
        return self.name

    def has_split(self, split: str) -> bool:
        """Ask the hub; if it does not answer, say yes."""
        try:
            return split in datasets.get_dataset_split_names(self.name, self.config)
        except Exception:  # reading the data will say what is wrong
            return True


def locate(flag: str, dataset_config: DataSource, hub_name: str | None, kinds: Sequence[str]) -> Files | Saved | Hub:
    """The place that `data_path` names, or `hub_name` if it is unset.

    Args:
        kinds: suffixes of the files that can be read.

    Raises:
        ConfigError: if nothing is there, or no file of these kinds.
    """
    path, train_split = dataset_config.data_path, dataset_config.train_split
    if path is None:
        if hub_name is None:
            raise ConfigError(
                f"--{flag}.data_path: is required; give a file, a folder, a glob, or OWNER/NAME on the hub"
            )
        return Hub(flag, hub_name, dataset_config.hub_config)
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            return Saved(flag, path, _load_saved(flag, local), train_split)
        return _files_of_folder(flag, local, dataset_config, kinds)
    if local.is_file():
        _check_kind(flag, local, kinds)
        return Files(flag, path, {train_split: [local]}, has_splits=False)
    if has_magic(path):
        found = sorted(set(_expand(local)))
        files = _one_kind(flag, path, _each_once([file for file in found if file.is_file()]), kinds)
        return Files(flag, path, {train_split: files}, has_splits=False)
    if _HUB_NAME.fullmatch(path) and local.suffix not in READERS:
        return Hub(flag, path, dataset_config.hub_config)
    raise ConfigError(f"--{flag}.data_path: {path} does not exist")


def _expand(pattern: Path) -> Iterator[Path]:
    """The paths that a pattern matches. Python's own `**` follows a link to a folder above it round and round."""
    if "**" not in pattern.parts:
        yield from map(Path, glob(str(pattern)))
        return
    place = pattern.parts.index("**")
    for top in _expand(Path(*pattern.parts[:place])) if place else [Path()]:
        for folder in _folders(top):
            yield from _expand(Path(escape(str(folder)), *(pattern.parts[place + 1 :] or ("*",))))


def _folders(top: Path) -> Iterator[Path]:
    """A folder and those below it, links followed, each once; hidden ones are left out, as by Python's `**`."""
    entered, waiting = set(), [top]
    while waiting:
        folder = waiting.pop(0)
        with suppress(OSError):  # as for a folder that cannot be read
            if (identity := folder.resolve()) not in entered:
                entered.add(identity)
                below = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
                waiting += below
                yield folder


def _each_once(files: list[Path]) -> list[Path]:
    """Each file by its shortest path, whatever links lead to it."""
    shortest: dict[Path, Path] = {}
    for file in sorted(files, key=lambda file: len(file.parts)):
        shortest.setdefault(file.resolve(), file)
    kept = set(shortest.values())
    return [file for file in files if file in kept]


def _files_of_folder(flag: str, folder: Path, config: DataSource, kinds: Sequence[str]) -> Files:
    """A folder of splits if a file or folder in it is named like a split; otherwise a folder of training files."""
    by_split = {}
    for split in (config.train_split, config.test_split):
        if files := _files_of_split(flag, folder, split, kinds):
            by_split[split] = files
    if by_split:
        return Files(flag, str(folder), by_split, has_splits=True)
    entries = sorted(folder.iterdir())
    if config.train_split != type(config).train_split:
        there = ", ".join(entry.name for entry in entries) or "nothing"
        raise ConfigError(
            f"--{flag}.train_split: {folder} has no {config.train_split}.* or {config.train_split}-*, but {there}; "
            "name a split that is there, or leave this out to train on all files"
        )
    files = _one_kind(flag, str(folder), entries, kinds)
    return Files(flag, str(folder), {config.train_split: files}, has_splits=False)


def _files_of_split(flag: str, folder: Path, split: str, kinds: Sequence[str]) -> list[Path]:
    """`train.jsonl`, or the shards `train-*.parquet`, or the files of the folder `train/`."""
    name = escape(split)
    found = sorted(file for file in folder.glob(f"{name}.*") if file.suffix in kinds)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"--{flag}.data_path: {folder} has more than one {split}.*: {names}; leave one there")
    found = found or sorted(file for file in folder.glob(f"{name}-*") if file.suffix in kinds)
    if not found and (folder / split).is_dir():
        found = sorted((folder / split).iterdir())
    return _one_kind(flag, str(folder), found, kinds) if found else []


def _one_kind(flag: str, path: str, files: list[Path], kinds: Sequence[str]) -> list[Path]:
    """The files that can be read; all must be of one kind."""
    readable = [file for file in files if file.is_file() and file.suffix in kinds]
    if not readable:
        raise ConfigError(f"--{flag}.data_path: {path} holds no {', '.join(kinds)} file; give files of these kinds")
    if len({READERS[file.suffix] for file in readable}) > 1:
        endings = ", ".join(sorted({file.suffix for file in readable}))
        raise ConfigError(
            f"--{flag}.data_path: {path} holds files of several kinds ({endings}); give one, like *.jsonl"
        )
    return readable


def _check_kind(flag: str, file: Path, kinds: Sequence[str]) -> None:
    if file.suffix not in kinds:
        raise ConfigError(f"--{flag}.data_path: {file} is none of {', '.join(kinds)}")


def _load_saved(flag: str, folder: Path) -> Any:
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(f"--{flag}.data_path: {folder} could not be read ({reason}); save it again") from error


def _no_validation(flag: str, path: str) -> str:
    return (
        f"--{flag}.data_path: {path} holds training rows alone, so there is no validation split; give a folder with "
        f"train.* and validation.*, --{flag}.validation_fraction 0.05, or --run_validation False"
    )
