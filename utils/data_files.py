"""Rows from a local file, a local folder or the hub, read by the Hugging Face library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import datasets

from configs.errors import ConfigError
from utils.hub import check_on_hub

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_split(
    flag: str, data_path: str | None, hub_name: str, split: str, *, columns: Sequence[str]
) -> datasets.Dataset:
    """One split with the columns that the recipe needs.

    Args:
        flag: the dataset's name on the command line, for messages.
        data_path: a file, or a folder with `train.*` and `validation.*`; None reads `hub_name`. One file holds the
            training split only.
        columns: columns that must be there and hold text.

    Raises:
        ConfigError: naming the path and what is wrong with it.
    """
    source = hub_name
    try:
        if data_path is None:
            check_on_hub(f"--{flag}.data_path", hub_name, "dataset")
            rows = datasets.load_dataset(hub_name, split=split)
        else:
            file = find_file(flag, Path(data_path).expanduser(), split)
            source = str(file)
            if file.stat().st_size == 0:
                raise ConfigError(f"--{flag}.data_path: {file} is empty")
            rows = datasets.load_dataset(READERS[file.suffix], data_files=str(file), split="train")
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        remedy = "give a local file or folder with" if data_path is None else "check the file, or give another with"
        raise ConfigError(f"--{flag}: {source} could not be read ({reason}); {remedy} --{flag}.data_path") from error
    missing = [name for name in columns if name not in rows.column_names]
    if missing:
        raise ConfigError(
            f"--{flag}.data_path: {source} has no column {', '.join(missing)}; it has {', '.join(rows.column_names)}"
        )
    for name in columns:
        bad = next((i for i, value in enumerate(rows[name]) if not isinstance(value, str)), None)
        if bad is not None:
            raise ConfigError(f"--{flag}.data_path: {source}, row {bad + 1}: column {name} is not text")
    return rows


def find_file(flag: str, path: Path, split: str) -> Path:
    """The file of a split.

    Raises:
        ConfigError: where there is none, or more than one.
    """
    if path.is_file():
        if path.suffix not in READERS:
            raise ConfigError(f"--{flag}.data_path: {path} is none of {', '.join(READERS)}")
        if split != "train":
            raise ConfigError(
                f"--{flag}.data_path: {path} is one file, so there is no validation split; "
                "give a folder with train.* and validation.*, or --run_validation False"
            )
        return path
    if not path.is_dir():
        raise ConfigError(f"--{flag}.data_path: {path} does not exist")
    found = sorted(file for file in path.glob(f"{split}.*") if file.suffix in READERS)
    if len(found) != 1:
        what = f"more than one: {', '.join(file.name for file in found)}" if found else "none"
        raise ConfigError(f"--{flag}.data_path: {path} needs one {split}{{{','.join(READERS)}}}, found {what}")
    return found[0]
