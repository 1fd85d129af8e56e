"""The meaning of `--NAME.data_path`: files, a `save_to_disk` folder or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

import datasets

from configs.datasets import DataSource, split_paths
from data.files.globs import each_once, files_of_glob
from data.files.kinds import ALL_KINDS, check_kind, ending, one_kind
from data.splits.files import Files, files_of_folder, no_validation, splits_of_file
from data.splits.saved_folder import is_saved, load_saved
from utils.errors import ConfigError, in_one_line

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


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
            raise ConfigError(no_validation(self.flag, self.path))
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


Place = Files | Saved | Hub


def locate(flag: str, dataset_config: DataSource, hub_name: str | None, kinds: Sequence[str]) -> Place:
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
        if is_saved(local):
            return Saved(flag, path, _load_saved(flag, local), train_split)
        return files_of_folder(flag, local, dataset_config, kinds)
    if local.is_file():
        check_kind(flag, local, kinds)
        return splits_of_file(flag, path, local, dataset_config)
    if has_magic(path) and split_paths(path) == [path]:
        files = one_kind(flag, path, each_once(files_of_glob(local)), kinds)
        return Files(flag, path, {train_split: files}, has_splits=False)
    if "," in path:
        files = [file for part in split_paths(path) for file in _files_of_part(flag, part, kinds)]
        files = one_kind(flag, path, each_once(list(dict.fromkeys(files))), kinds)
        return Files(flag, path, {train_split: files}, has_splits=False)
    if HUB_NAME.fullmatch(path) and ending(local) not in ALL_KINDS:
        return Hub(flag, path, dataset_config.hub_config)
    raise ConfigError(f"--{flag}.data_path: {local.absolute()} does not exist")


def _files_of_part(flag: str, part: str, kinds: Sequence[str]) -> list[Path]:
    """The file, or the files of the glob, that one part of a list names."""
    local = Path(part).expanduser()
    if local.is_file():
        check_kind(flag, local, kinds)
        return [local]
    if has_magic(part) and (files := files_of_glob(local)):
        return files
    raise ConfigError(f"--{flag}.data_path: {part} is no file and no glob of files; a list names these alone")


def _load_saved(flag: str, folder: Path) -> Any:
    try:
        return load_saved(folder)
    except Exception as error:
        reason = in_one_line(error)
        raise ConfigError(f"--{flag}.data_path: {folder} could not be read ({reason}); save it again") from error
