"""Which files are which split: by the names of a folder's files and folders, or as lists of one JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.datasets import DataSource
from data.files.globs import each_once
from data.files.json_of_one_value import key_of_rows, lists_of_rows
from data.files.kinds import ALL_KINDS, JSON, ending, one_kind, readable
from data.splits.names import names_of, split_in_name
from utils.errors import ConfigError
from utils.git_lfs import PULL, is_pointer

_NUM_NAMED = 5  # of what holds no rows


@dataclass(frozen=True)
class Files:
    """Files by split; files without a split are training data."""

    flag: str
    path: str
    by_split: dict[str, list[Path]]
    has_splits: bool
    note: str = ""  # what was made of the names, if these are not train.* and validation.*

    def __str__(self) -> str:
        return self.path

    def has_split(self, split: str) -> bool:
        return split in self.by_split

    def files_of(self, split: str) -> list[Path]:
        """The files of a split.

        Raises:
            ConfigError: if there are none, or one is a pointer of git lfs, which text would hold as well.
        """
        if split in self.by_split:
            if pointer := next(filter(is_pointer, self.by_split[split]), None):
                raise ConfigError(f"--{self.flag}.data_path: {pointer} cannot be read: {PULL}")
            return self.by_split[split]
        if self.has_splits:
            there = ", ".join(file.name for files in self.by_split.values() for file in files)
            raise ConfigError(
                f"--{self.flag}.data_path: {self.path} needs {split}{{{','.join(ALL_KINDS)}}}, and has {there}; name "
                f"the splits that are there with --{self.flag}.train_split and .test_split"
            )
        raise ConfigError(no_validation(self.flag, self.path))


def unread_lists(files: Files) -> list[str]:
    """Lines on lists of rows in JSON objects that no split reads."""
    lines, all_files = [], dict.fromkeys(file for found in files.by_split.values() for file in found)
    for file in all_files:
        if ending(file) in JSON and (keys := lists_of_rows(file)):
            splits = [split for split, found in files.by_split.items() if file in found]
            read = {key_of_rows(keys, names_of(split, is_default=True)) for split in splits}
            unread = [key for key in keys if key not in read]
            if unread and None not in read:
                lines.append(f"{file}: {', '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read")
    return lines


def splits_of_file(flag: str, path: str, file: Path, config: DataSource) -> Files:
    """A file is training data, or holds splits as lists of a JSON object, as in `{"train": [...], "test": [...]}`."""
    keys = lists_of_rows(file)
    names = {split: names_of(split, is_default) for split, is_default in _asked(config)}
    there = {split: [file] for split, known in names.items() if any(name in keys for name in known)}
    if not there:
        return Files(flag, path, {config.train_split: [file]}, has_splits=False)
    return Files(flag, path, there, has_splits=list(there) != [config.train_split])


def files_of_folder(flag: str, folder: Path, config: DataSource, kinds: Sequence[str]) -> Files:
    """A folder of splits if a file or folder in it is named like a split; otherwise a folder of training files.

    A folder with nothing but a folder `data`, as most repositories of the hub are, stands for that.
    """
    inner = [entry for entry in _entries(folder) if entry.is_dir()]
    if inner == [folder / "data"] and not readable(_entries(folder), kinds):
        folder = inner[0]
    asked, entries = _asked(config), _entries(folder)
    by_split = {split: files for split, _ in asked if (files := _files_of_split(flag, folder, split, kinds))}
    # Words of names are looked at only if the names of splits themselves do not decide.
    by_word = {} if len(by_split) == len(asked) else _files_by_word(flag, folder, by_split, kinds)
    for split, is_default in asked:
        names = names_of(split, is_default)
        if split not in by_split and (files := _files_of_names(flag, folder, names, by_word, kinds)):
            by_split[split] = files
    lacks_validation = config.train_split in by_split and config.test_split not in by_split
    if lacks_validation and config.test_split == type(config).test_split:
        # A folder of train and test alone is evaluated on test, and the note says so.
        tests = _files_of_names(flag, folder, ("test",), by_word, kinds)
        by_split |= {config.test_split: tests} if tests else {}
    by_split = {split: by_split[split] for split, _ in asked if split in by_split}
    if by_split:
        trains_alone = list(by_split) == [config.train_split] and config.test_split == type(config).test_split
        note = _note(folder, by_split, entries, kinds)
        return Files(flag, str(folder), by_split, has_splits=not trains_alone, note=note)
    if config.train_split != type(config).train_split:
        there = ", ".join(entry.name for entry in entries) or "nothing"
        raise ConfigError(
            f"--{flag}.train_split: {folder} has no {config.train_split}.* or {config.train_split}-*, but {there}; "
            "name a split that is there, or leave this out to train on all files"
        )
    if by_word:
        there = ", ".join(file.name for files in by_word.values() for file in files)
        raise ConfigError(
            f"--{flag}.data_path: {folder} has no file named {config.train_split}, but {there}; name a split with "
            f"--{flag}.train_split, or the file itself"
        )
    files = one_kind(flag, str(folder), each_once(entries), kinds)
    return Files(flag, str(folder), {config.train_split: files}, has_splits=False, note=_others(folder, files))


def _asked(config: DataSource) -> list[tuple[str, bool]]:
    """The two splits, and whether each has its default name, which stands for others like it."""
    kind = type(config)
    return [
        (config.train_split, config.train_split == kind.train_split),
        (config.test_split, config.test_split == kind.test_split),
    ]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, hidden things apart: `.a.jsonl`, and macOS' `._a.jsonl`; sorted."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _files_by_word(
    flag: str, folder: Path, by_split: dict[str, list[Path]], kinds: Sequence[str]
) -> dict[str, list[Path]]:
    """The files whose names hold a split's name as a word, `samsum_train.jsonl`, by that word.

    Args:
        by_split: files that are a split's by their whole names.

    Raises:
        ConfigError: if a name holds two, or if some names hold one and others do not.
    """
    taken = {file for files in by_split.values() for file in files}
    by_word: dict[str, list[Path]] = {}
    for file in readable(_entries(folder), kinds):
        words = [] if file in taken else split_in_name(file.name.removesuffix(ending(file)))
        if len(words) > 1:
            raise ConfigError(
                f"--{flag}.data_path: {file} could be {' or '.join(words)}; rename it, name splits with "
                f"--{flag}.train_split and .test_split, or name the file or a glob"
            )
        by_word.setdefault(words[0] if words else "", []).append(file)
    unnamed = [file.name for file in by_word.pop("", [])]
    if by_word and unnamed and not by_split and not any(_files_of_split(flag, folder, word, kinds) for word in by_word):
        there = ", ".join(file.name for found in by_word.values() for file in found)
        raise ConfigError(
            f"--{flag}.data_path: {folder} holds files named like splits ({there}) and others ({', '.join(unnamed)}); "
            f"rename them, name splits with --{flag}.train_split and .test_split, or train on all with a glob in "
            "quotes, like '*.jsonl'"
        )
    return by_word


def _files_of_split(flag: str, folder: Path, split: str, kinds: Sequence[str]) -> list[Path]:
    """`train.jsonl`, or the shards `train-*.parquet`, or the files of the folder `train/`."""
    files = readable(_entries(folder), kinds)
    found = [file for file in files if file.name in (split, f"{split}{ending(file)}")]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"--{flag}.data_path: {folder} has more than one {split}.*: {names}; leave one there")
    found = found or [file for file in files if file.name.startswith(f"{split}-")]
    return one_kind(flag, str(folder), each_once(found), kinds) if found else _files_in(flag, folder / split, kinds)


def _files_of_names(
    flag: str, folder: Path, names: Sequence[str], by_word: dict[str, list[Path]], kinds: Sequence[str]
) -> list[Path]:
    """The files whose names hold one of these as a word, or those of a folder of that name."""
    if files := [file for name in names for file in by_word.get(name, [])]:
        return one_kind(flag, str(folder), each_once(files), kinds)
    return next((files for name in names if (files := _files_in(flag, folder / name, kinds))), [])


def _files_in(flag: str, folder: Path, kinds: Sequence[str]) -> list[Path]:
    return one_kind(flag, str(folder), each_once(_entries(folder)), kinds) if folder.is_dir() else []


def _note(folder: Path, by_split: dict[str, list[Path]], entries: list[Path], kinds: Sequence[str]) -> str:
    """Which files are which split, if their names alone do not say it, and which are not read."""
    taken = {file for files in by_split.values() for file in files}
    parts = [
        f"{split} is {', '.join(str(file.relative_to(folder)) for file in files)}"
        for split, files in by_split.items()
        if any(split not in (file.name.split(".")[0].split("-")[0], file.parent.name) for file in files)
    ]
    if unread := [file.name for file in readable(entries, kinds) if file not in taken]:
        parts.append(f"not read: {', '.join(unread)}")
    return f"{folder}: {'; '.join(parts)}" if parts else ""


def _others(folder: Path, files: list[Path]) -> str:
    """What else lies in a folder of files of one kind, hidden things apart: a text in .md, or one folder deeper."""
    taken = set(files)
    others = [path.name + "/" * path.is_dir() for path in _entries(folder) if path not in taken]
    more = [f"{len(others) - _NUM_NAMED} more"] if len(others) > _NUM_NAMED else []
    return f"{folder}: no rows are read from {', '.join([*others[:_NUM_NAMED], *more])}" if others else ""


def no_validation(flag: str, path: str) -> str:
    return (
        f"--{flag}.data_path: {path} holds training rows alone, so there is no validation split; give a folder with "
        f"train.* and validation.*, --{flag}.validation_fraction 0.05, or --run_validation False"
    )
