"""Find the checkpoint that a run goes on from and the folder that it goes on in; check every byte before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.state_json import StateError, read_state
from configs.run import RunConfig
from configs.training import TrainConfig
from ranks.agreement import named
from ranks.collectives import gather_to_all, on_rank_zero
from ranks.environment import Environment, print_rank_zero
from run_folder.checkpoint_folder import (
    COMPLETE,
    FULL_FILE,
    STATE,
    STREAM,
    checkpoints,
    damage,
    incomplete_checkpoints,
    listed_files,
)
from run_folder.default_folders import folder_of_job, latest_run_folder, outputs
from run_folder.entries import held_entries
from run_folder.gone import holder_of_gone, refuse_if_gone
from run_folder.run_folder import check_can_begin, checkpoint_root, checkpoint_root_of, run_folder_of
from run_folder.run_yaml import now, read_run_yaml
from utils.errors import ConfigError

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

    def stream_state(self) -> bytes | None:
        """Where the run was in its stream; None if it had none, or was of an earlier version."""
        return (self.folder / STREAM).read_bytes() if STREAM in listed_files(self.folder) else None

    def summary(self, env: Environment) -> dict[str, Any]:
        """What run.yaml records about resuming from here."""
        return {"from": str(self.folder), "step": self.step, "world_size": env.world_size, "time": now()}


def resolve_resume(config: RunConfig, env: Environment) -> RunConfig:
    """The config with --resume and --output_dir settled: a resumed run goes on in its folder, and a job that its
    launcher restarted resumes by itself.

    A restarted job that had no folder of its own yet does what it did the first time: what it was refused, or was to
    overwrite, is another run.

    Raises:
        ConfigError: if --resume names no run and --output_dir is not given.
    """
    train, notes = config.train_config, list(config.notes)
    if env.restarted and train.resume is None and (own := folder_of_job(train, env)):
        train = replace(train, resume="auto", overwrite=False, output_dir=str(own))
        notes.append("resume: auto, since the launcher has restarted this job")
    elif train.resume == "auto" and train.output_dir is None:
        folder = (env.restarted and folder_of_job(train, env)) or latest_run_folder(train, outputs(env))
        train = replace(train, output_dir=str(folder) if folder else None)
    elif train.resume and train.resume != "auto" and train.output_dir is None:
        folder = run_folder_of(Path(train.resume))
        if not Path(train.resume).exists():
            refuse_if_gone(Path(train.resume))
            raise ConfigError(f"--resume: there is no {train.resume}; give a run's folder, or a checkpoint in it")
        if folder is None:
            raise ConfigError(f"--resume: {train.resume} is in no run folder; give --output_dir for what comes")
        train = replace(train, output_dir=str(folder))
    return replace(config, train_config=train, notes=tuple(notes))


def find_checkpoints(train: TrainConfig, env: Environment) -> list[Path]:
    """The checkpoints to try to resume from, in this order; none if the run starts afresh.

    Raises:
        ConfigError: if --resume names something that is no checkpoint.
    """
    if not train.resume:
        return []
    run = None if train.output_dir is None else Path(train.output_dir)
    own = [] if run is None else next(filter(None, map(checkpoints, _own_roots(train, run))), [])
    if train.resume == "auto":
        own = own or _begun_from(run)
        if not own:
            check_can_begin(train)
        return own
    if own and env.restarted:
        return own
    path = Path(train.resume)
    found = checkpoints(path) or checkpoints(checkpoint_root_of(path))
    if not found and (path / COMPLETE).is_file() and (path / STATE).is_file():
        found = [path]
    if not found:
        refuse_if_gone(path)
        what = "is not there" if not path.exists() else f"holds no complete checkpoint (no {COMPLETE} in it)"
        raise ConfigError(
            f"--resume: {path} {what}; give a run folder, a folder like checkpoints/step-00000020, or auto"
        )
    if run is not None:
        _check_holds_no_other_run(run, found, _own_roots(train, run), has_own=bool(own))
    return found


def passed_over(train: TrainConfig, taken: Checkpoint | None) -> list[Path]:
    """The incomplete checkpoints that are newer than the one taken; all of them if the run starts afresh.

    Empty if the one taken was asked for by its own path.
    """
    if not train.resume:
        return []
    roots = [] if train.output_dir is None else _own_roots(train, Path(train.output_dir))
    if taken is not None and train.resume != "auto":
        if taken.folder.resolve() == Path(train.resume).resolve():
            return []
        roots.append(taken.folder.parent)
    after = -1 if taken is None else taken.step
    each = {root.resolve(): root for root in roots}.values()
    return [folder for root in each for folder in incomplete_checkpoints(root, after=after)]


def _own_roots(train: TrainConfig, run: Path) -> list[Path]:
    """Where the run in this folder may have checkpoints: where it will write them and where it did so far."""
    return [checkpoint_root(train, run), checkpoint_root_of(run), run / "checkpoints"]


def _check_holds_no_other_run(run: Path, found: list[Path], own_roots: list[Path], *, has_own: bool) -> None:
    """Refuse to resume from one run's checkpoint in the folder of another run, whose results would be lost.

    A run that began from this very checkpoint, and has none of its own yet, may begin again.
    """
    roots = {root.resolve() for root in own_roots}
    is_own = not roots.isdisjoint({found[0].resolve(), found[0].resolve().parent})
    begins_again = not has_own and [path.resolve() for path in _begun_from(run)] == [found[0].resolve()]
    if not is_own and not begins_again and (held := held_entries(run)):
        raise ConfigError(
            f"--output_dir: {run} already holds a run that {found[0]} is not of ({', '.join(held)}); "
            "give another folder, or --resume auto to go on with that run"
        )


def _begun_from(run: Path | None) -> list[Path]:
    """The checkpoint that this run was resumed from, if it is still there."""
    if run is None or not (run / "run.yaml").is_file():
        return []
    resumed = read_run_yaml(run).get("resumed") or []
    folder = Path(resumed[-1]["from"]) if resumed else None
    return [folder] if folder is not None and (folder / COMPLETE).is_file() else []


def open_checkpoint(folders: list[Path], env: Environment, *, every_file: bool) -> Checkpoint | None:
    """The first undamaged checkpoint. What is wrong with those before it is printed.

    One may be gone by now, deleted by its run, which still goes on.

    Args:
        folders: those that rank 0 sees.
        every_file: check every file, each rank that sees them its share, and agree with the other ranks; else check
            only the small files, without collectives. For rank 0 alone then.

    Raises:
        ConfigError: if all are damaged, or only some ranks see one that is in shards.
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
            else:
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
    """The ranks that do not see rank 0's checkpoint in this folder, or another one."""
    own = b""
    with contextlib.suppress(OSError):
        own = (folder / COMPLETE).read_bytes()
    first = on_rank_zero(lambda: own)
    return tuple(rank for rank, sees in enumerate(gather_to_all(own == first)) if not sees)


def _check_seen(folder: Path, blind: tuple[int, ...]) -> None:
    """Refuse a checkpoint in shards that not all ranks see; what rank 0 has gathered it can send them."""
    if blind and not on_rank_zero(lambda: (folder / FULL_FILE).is_file()):
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
    """As `damage`, but each file is read by one rank only, of those that see it."""
    reason, readers = "", [rank for rank in range(env.world_size) if rank not in blind]
    try:
        if env.rank in readers:
            reason = damage(folder, sorted(listed_files(folder))[readers.index(env.rank) :: len(readers)])
    except ValueError as error:
        reason = str(error)
    return next((found for found in gather_to_all(reason) if found), "")
