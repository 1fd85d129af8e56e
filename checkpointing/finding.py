"""Open the checkpoint that a run goes on from: every byte is checked before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.marks import foreign_file
from checkpointing.state_json import StateError, read_state
from ranks.agreement import named
from ranks.collectives import gather_to_all, on_rank_zero
from ranks.environment import Environment, print_rank_zero
from run_folder.checkpoint_folder import COMPLETE, STREAM, damage, is_gathered, listed_files
from run_folder.other_runs import holder_of_gone, refuse_if_gone
from run_folder.run_yaml import now
from utils.errors import ConfigError
from utils.small_files import read_bytes

T = TypeVar("T")

_SMALL_BYTES = 2**24


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and the values of its state.json."""

    folder: Path
    values: dict[str, Any]
    blind: tuple[int, ...] = ()  # the ranks that do not see its files: they are on the disk of rank 0's node

    @property
    def step(self) -> int:
        return int(self.values["state"]["step"])

    @property
    def global_batch_size(self) -> int:
        return int(self.values["global_batch_size"])

    @property
    def was_compiled(self) -> bool | None:
        """Whether its last session compiled layers; None if an earlier version wrote it, which could not."""
        compiled: bool | None = self.values["settings"]["train_config"].get("compile")
        return compiled

    @property
    def shares_prompts(self) -> bool:
        """Whether its pairs share their prompt; earlier versions could not."""
        return bool(self.values.get("shares_prompts", False))

    def stream_state(self) -> bytes | None:
        """The run's place in its stream; None if it had none, or was of an earlier version."""
        return read_bytes(self.folder / STREAM, most_bytes=2**30) if STREAM in listed_files(self.folder) else None

    def summary(self, env: Environment) -> dict[str, Any]:
        """The entry of run.yaml about resuming from here."""
        return {"from": str(self.folder), "step": self.step, "world_size": env.world_size, "time": now()}


def open_checkpoint(folders: Sequence[Path], env: Environment, *, every_file: bool) -> Checkpoint | None:
    """The first undamaged checkpoint. A line is printed about each damaged one before it.

    A checkpoint may be gone by now, if the run that wrote it still goes on and has deleted it.

    Args:
        folders: as rank 0 sees them.
        every_file: check every file, split over the ranks that see them, and agree with the other ranks. Otherwise
            rank 0 alone calls this; it checks only the small files, without collectives.

    Raises:
        ConfigError: if all are damaged, or if a sharded one is not seen by all ranks.
    """

    def on_one(look: Callable[[], T]) -> T:
        return on_rank_zero(look) if every_file else look()

    reason = ""
    gone: list[str] = []  # said only if there is another
    for folder in folders:
        blind = _ranks_without(folder) if every_file else ()
        reason = _shared_damage(folder, env, blind) if every_file else _damage_of_small_files(folder)
        if not reason:
            try:
                values = on_one(partial(_values, folder))
            except ConfigError as error:
                reason = str(error)
            if not reason and every_file:
                reason = _foreign_file(folder, values, env, blind)
            if not reason:
                _check_seen(folder, blind)
                if every_file:
                    print_rank_zero(env, *gone)
                return Checkpoint(folder, values, blind)
        if holder := on_one(partial(holder_of_gone, folder)):
            gone.append(f"checkpoint: {folder} is not there any more; {holder} still goes on there")
        elif every_file or folder is folders[-1]:
            print_rank_zero(env, f"checkpoint: {folder} is damaged: {reason}")
    if folders:
        on_one(partial(refuse_if_gone, folders[-1]))
        raise ConfigError(
            f"--resume: {folders[-1]} is damaged ({reason}), and there is no other; give another checkpoint, or "
            "--overwrite to start afresh"
        )
    return None


def _values(folder: Path) -> dict[str, Any]:
    try:
        return read_state(folder)
    except StateError as error:
        raise ConfigError(str(error)) from error


def _ranks_without(folder: Path) -> tuple[int, ...]:
    """The ranks that see no checkpoint in this folder, or another one than rank 0."""
    # Not whether the folder exists: each node's own disk may hold a folder of this name, from another run.
    own = b""
    with contextlib.suppress(OSError):
        own = read_bytes(folder / COMPLETE)
    first = on_rank_zero(lambda: own)
    return tuple(rank for rank, sees in enumerate(gather_to_all(own == first)) if not sees)


def _check_seen(folder: Path, blind: tuple[int, ...]) -> None:
    """Refuse a sharded checkpoint that not all ranks see. A gathered one is sent to them by rank 0."""
    if blind and not on_rank_zero(lambda: is_gathered(folder)):
        raise ConfigError(
            f"--resume: {folder} holds shards that {named(list(blind))} do{'es' * (len(blind) == 1)} not see; put it "
            "on a disk that all nodes share, or copy it to every node"
        )


def _damage_of_small_files(folder: Path) -> str:
    try:
        files = listed_files(folder)
    except ValueError as error:
        return str(error)
    return damage(folder, [name for name, file in files.items() if file["bytes"] < _SMALL_BYTES])


def _shared_damage(folder: Path, env: Environment, blind: tuple[int, ...]) -> str:
    """Like `damage`, but the files are split over the ranks that see them."""
    return _first_reason(folder, env, blind, partial(damage, folder))


def _foreign_file(folder: Path, values: dict[str, Any], env: Environment, blind: tuple[int, ...]) -> str:
    """Like `foreign_file`, but the files are split over the ranks that see them."""
    return _first_reason(folder, env, blind, partial(foreign_file, folder, values))


def _first_reason(folder: Path, env: Environment, blind: tuple[int, ...], look: Callable[[list[str]], str]) -> str:
    """The first rank's reason, on every rank. Each that sees the folder looks at some of its files."""
    reason, readers = "", [rank for rank in range(env.world_size) if rank not in blind]
    try:
        if env.rank in readers:
            reason = look(sorted(listed_files(folder))[readers.index(env.rank) :: len(readers)])
    except (OSError, ValueError) as error:  # one that raised here would leave the others waiting
        reason = " ".join(str(error).split()) or type(error).__name__
    return next((found for found in gather_to_all(reason) if found), "")
