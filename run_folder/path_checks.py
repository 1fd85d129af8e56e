"""Where a run reads and writes: refused, before anything is deleted, if it would lose what is not its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from configs.datasets import ChatDataset, CustomDataset, InstructionDataset, split_paths
from configs.names import flag
from configs.run import RunConfig
from run_folder.checkpoint_folder import is_ours, is_step_folder
from run_folder.checkpoint_root import check_root
from run_folder.entries import CHECKPOINTS, RUN_ENTRIES, entries_of, made_entries
from run_folder.final_copy import copied_entries
from run_folder.run_folder import check_entries, checkpoint_root
from run_folder.run_yaml import NAME, is_of_a_run, read_run_yaml
from utils.errors import ConfigError


def check_paths(config: RunConfig, folder: Path, *, afresh: bool) -> None:
    """Refuse a run that would delete or replace what no run wrote, or what it reads itself. Writes nothing.

    Args:
        folder: the run's.
        afresh: whether it goes on from no checkpoint, so that what an earlier run left there is deleted.

    Raises:
        ConfigError: with the remedy.
    """
    root = checkpoint_root(config.train_config, folder)
    _check_in_no_run("--output_dir", folder, own=folder)
    _check_in_no_run("--dist_checkpoint_folder", root, own=folder)
    check_entries(config, folder, afresh=afresh)
    check_root(config.train_config, folder, afresh=afresh)
    doomed = {_identity(path): path for path in _replaced(config, folder, root) if os.path.exists(path)}
    for name, path in _inputs(config):
        real = Path(os.path.realpath(path))
        for place in (real, *real.parents):
            if (found := doomed.get(_identity(place))) is not None:
                raise ConfigError(
                    f"{name}: {path} lies in {found}, which this run replaces or deletes; copy it elsewhere, or give "
                    "another --output_dir"
                )


def _check_in_no_run(name: str, place: Path, *, own: Path) -> None:
    """Refuse a place within what a run writes into its folder: that run would replace or delete it."""
    for parent in place.parents:
        entry = place.relative_to(parent).parts[0]
        if parent == own:
            is_in_it = entry in RUN_ENTRIES and entry != CHECKPOINTS
        else:
            is_in_it = entry in RUN_ENTRIES and (parent / NAME).is_file() and is_of_a_run(read_run_yaml(parent))
        if is_in_it:
            raise ConfigError(f"{name}: {place} lies in {parent / entry}, which is the run's in {parent}; give another")


def _identity(path: Path) -> tuple[int, int]:
    """Names what is there, by whichever path."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def _replaced(config: RunConfig, folder: Path, root: Path) -> Iterator[Path]:
    """What this run writes, replaces or deletes."""
    names = {*entries_of(config.to_dict()), *made_entries(folder)} - {CHECKPOINTS}
    yield from (folder / name for name in names)
    for place in {root, folder / CHECKPOINTS}:
        for path in place.iterdir() if place.is_dir() else ():
            if is_ours(path) or is_step_folder(path):
                yield path
    if config.train_config.dist_checkpoint_root_folder and config.train_config.save_model:
        yield from copied_entries(root)


def _inputs(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """The files and folders that the run reads, with the flag that names them; what is on the hub left out."""
    train = config.train_config
    named = {"--config": config.recipe}
    for name in ("model_name", "tokenizer_name", "from_peft_checkpoint"):
        named[flag(f"train_config.{name}")] = getattr(train, name)
    for name, source in config.dataset_configs.items():
        named[flag(f"{name}.data_path")] = source.data_path
        if isinstance(source, ChatDataset | InstructionDataset):
            named[flag(f"{name}.chat_template")] = source.chat_template
        if isinstance(source, CustomDataset) and source.file is not None:
            named[flag(f"{name}.file")] = source.file.partition(":")[0]
    parts = [(name, part) for name, value in named.items() if value for part in _parts(name, value)]
    for name, value in parts:
        if os.path.exists(value):
            yield from ((name, path) for path in _with_links(Path(value)))
        elif has_magic(value):
            yield from ((name, Path(found)) for found in glob(value, recursive=True))


def _parts(name: str, value: str) -> list[str]:
    """A list of data files as its files; any other path as it is."""
    return split_paths(value) if name.endswith(".data_path") else [value]


def _with_links(path: Path) -> Iterator[Path]:
    """The path, and the links in it and in its own folders: what is read through them may lie anywhere."""
    yield path
    for folder in (path, *(inner for inner in _listed(path) if inner.is_dir() and not inner.is_symlink())):
        yield from (inner for inner in _listed(folder) if inner.is_symlink() and inner.exists())


def _listed(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK) else []
