"""Reads a folder of `save_to_disk`: a dataset, or several by the names of their splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from utils.small_files import read_json

_OF_DATASET, _OF_SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in (_OF_DATASET, _OF_SPLITS))


def load_saved(folder: Path) -> Any:
    """The dataset in a folder, or a dict of its splits.

    Raises:
        ValueError: if it names files outside of the folder, which whoever wrote it need not have been able to read.
        Exception: whatever else the library stumbles over.
    """
    if (folder / _OF_SPLITS).is_file():
        for split in _list_in(folder / _OF_SPLITS, "splits"):
            _check_inside(folder, _OF_SPLITS, split)
            _check_files(folder / split)
    _check_files(folder)
    return datasets.load_from_disk(str(folder))


def _check_files(folder: Path) -> None:
    if not (folder / _OF_DATASET).is_file():
        return
    for entry in _list_in(folder / _OF_DATASET, "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        _check_inside(folder, _OF_DATASET, name)
        if not (folder / str(name)).is_file():
            raise ValueError(f"{_OF_DATASET} names {name}, which is no file")


def _list_in(file: Path, key: str) -> list[Any]:
    value = read_json(file)
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"{file.name} has no list {key}")
    return found


def _check_inside(folder: Path, file: str, name: Any) -> None:
    # Links in the folder may lead anywhere: the hub's cache is made of them.
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{file} names {name!r}, which is no place in {folder}")
