"""Folders that a run is refused, since it could not write there or would replace what is not its own.

Nothing is written here. Every function raises ConfigError, with the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from run_folder.checkpoint_folder import COMPLETE, checkpoints, foreign_entries
from run_folder.entries import CHECKPOINTS, FILES, REPLACED, RUN_ENTRIES, held_entries, made_entries
from run_folder.final_copy import foreign_copy
from run_folder.inputs import paths_of
from run_folder.run_yaml import NAME, is_damaged, is_of_a_run, read_run_yaml
from utils.errors import ConfigError


def check_writable(flag: str, folder: Path) -> None:
    """Refuse a folder that could not be made or written, by its nearest parent that exists."""
    existing = folder
    while not existing.exists():
        if existing.is_symlink():
            target = existing.parent / existing.readlink()
            raise ConfigError(
                f"{flag}: {existing} is a symbolic link to {target}, which is not there; make that folder, or give "
                "another one"
            )
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{flag}: {existing} is a file, not a folder; give another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {existing} cannot be written; give a folder that can")


def check_in_no_run(flag: str, place: Path, *, own: Path) -> None:
    """Refuse a place inside an entry of a run folder: that run would replace or delete it.

    Args:
        own: the folder of this run.
    """
    for parent in place.parents:
        entry = place.relative_to(parent).parts[0]
        if parent == own:
            is_in_it = entry in RUN_ENTRIES and entry != CHECKPOINTS
        else:
            is_in_it = entry in RUN_ENTRIES and (parent / NAME).is_file() and is_of_a_run(read_run_yaml(parent))
        if is_in_it:
            raise ConfigError(f"{flag}: {place} lies in {parent / entry}, which is the run's in {parent}; give another")


def check_entries(folder: Path, written: Sequence[str], *, afresh: bool, overwrite: bool, resumes: bool) -> None:
    """Refuse a run folder in which the run would delete or replace what no run wrote.

    Args:
        written: the names of what the run writes there.
        afresh: whether what an earlier run left will be deleted.
        resumes: whether --resume was given.
    """
    places = [folder / name for name in FILES]
    if odd := [path.name for path in places if path.exists() and not path.is_file() and not path.is_symlink()]:
        raise ConfigError(
            f"--output_dir: {', '.join(odd)} in {folder} is no regular file, as runs write there; remove it, or give "
            "another folder"
        )
    held, damaged = held_entries(folder), is_damaged(folder)
    if not held:
        return
    made = made_entries(folder)
    names = ", ".join(held)
    if not made and not damaged:
        complete = max(folder.glob(f"{CHECKPOINTS}/step-*/{COMPLETE}"), default=None)
        goes_on = f" (with --resume {complete.parent} to go on from there)" if complete else ""
        raise ConfigError(
            f"--output_dir: {folder} holds {names}, but no run (no {NAME} of one), so nothing there is touched; give "
            f"another folder{goes_on}, or move that away"
        )
    if not overwrite and not resumes:
        raise ConfigError(
            f"--output_dir: {folder} already holds a run ({names}); "
            "give another folder, --resume auto to go on with it, or --overwrite to replace it"
        )
    if damaged and afresh:
        raise ConfigError(
            f"--output_dir: {folder / NAME} is damaged and does not tell what the run there wrote ({names}), so "
            "nothing of it is deleted; give another folder, or move that away"
        )
    made = made or list(written)  # a damaged run.yaml next to checkpoints: they belong together
    if foreign := [name for name in written if name in held and name not in made]:
        raise ConfigError(
            f"--output_dir: {folder} holds {', '.join(foreign)}, which the run there did not write and this one would "
            "replace; give another folder, or move that away"
        )
    gone = {*made, *written} - {CHECKPOINTS} if afresh else {*written}.intersection(REPLACED)
    if links := [name for name in held if name in gone and (folder / name).is_symlink()]:
        raise ConfigError(
            f"--output_dir: {', '.join(links)} in {folder} is a symbolic link, which no run makes and this one would "
            "replace; give another folder, or remove the link"
        )


def check_checkpoints(
    root: Path, flag: str, *, is_elsewhere: bool, holds_copy: bool, afresh: bool, overwrite: bool, resumes: bool
) -> None:
    """Refuse a checkpoint folder in which the run would replace what is not its own.

    Args:
        is_elsewhere: whether it lies apart from the run folder.
        holds_copy: whether the run writes a copy of its final state into it.
        afresh: whether the run goes on from no checkpoint.
        resumes: whether --resume was given.
    """
    foreign = foreign_entries(root) + (foreign_copy(root) if holds_copy else [])
    if foreign:
        raise ConfigError(
            f"{flag}: {root} holds {', '.join(foreign)}, which this program did not write and would have to replace; "
            "give another folder, or move that away"
        )
    held = checkpoints(root)[:1] + [root] * (is_elsewhere and (root / COMPLETE).exists())
    if held and afresh and not overwrite:
        goes_on = f", --resume {held[0]} with the --output_dir of its run" if resumes else ""
        raise ConfigError(f"{flag}: {root} already holds a checkpoint; give another folder{goes_on}, or --overwrite")


def check_inputs_stay(inputs: Iterable[tuple[str, str]], replaced: Iterable[Path]) -> None:
    """Refuse a run that would replace or delete what it reads, also through symbolic links.

    Args:
        inputs: flag, and path or pattern.
        replaced: the paths that the run replaces or deletes.
    """
    doomed = {_identity(path): path for path in replaced if os.path.exists(path)}
    for flag, path in ((flag, path) for flag, value in inputs for path in paths_of(value)):
        real = Path(os.path.realpath(path))
        for place in (real, *real.parents):
            if (found := doomed.get(_identity(place))) is not None:
                raise ConfigError(
                    f"{flag}: {path} lies in {found}, which this run replaces or deletes; copy it elsewhere, or give "
                    "another --output_dir"
                )


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode: the same by whichever path."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino
