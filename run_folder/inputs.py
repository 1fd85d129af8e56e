"""The files and folders that a run reads, and so must not replace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from configs.datasets import split_paths
from configs.names import flag
from configs.run import RunConfig
from configs.setting import settings_of


def inputs_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Inputs that the settings name: the flag, and the path or pattern. Names on the hub are among them."""
    train = config.train_config
    named = {"--config": config.recipe}
    for name in ("model_name", "tokenizer_name", "from_peft_checkpoint"):
        named[flag(f"train_config.{name}")] = getattr(train, name)
    for name, source in config.dataset_configs.items():
        for field, setting in settings_of(type(source)).items():
            if setting.is_path and (path := getattr(source, field)) is not None:
                # custom_dataset.file may be FILE:FUNCTION.
                named[flag(f"{name}.{field}")] = path.partition(":")[0] if field == "file" else path
    for name, value in named.items():
        if value and name.endswith(".data_path"):
            yield from ((name, part) for part in split_paths(value))
        elif value:
            yield name, value


def paths_of(value: str) -> Iterator[Path]:
    """The files and folders that a path or a pattern names, with the links in them; none if nothing is there."""
    if os.path.exists(value):
        yield from _with_links(Path(value))
    elif has_magic(value):
        yield from map(Path, glob(value, recursive=True))


def _with_links(path: Path) -> Iterator[Path]:
    """The path, and the links in it and in its own folders, whose targets may lie anywhere."""
    yield path
    for folder in (path, *(inner for inner in _listed(path) if inner.is_dir() and not inner.is_symlink())):
        yield from (inner for inner in _listed(folder) if inner.is_symlink() and inner.exists())


def _listed(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK) else []
