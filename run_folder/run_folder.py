"""The run folder: where a run writes, whose folder that is, and what the run may replace there.

A `RunFolder` is planned once from the settings and then asked. Others' files may lie in the folder, too: run.yaml lists
the entries that a run wrote, and nothing else is deleted or replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from ranks.environment import Environment
from run_folder.checkpoint_folder import is_ours, is_step_folder, remove_all
from run_folder.default_folders import PLACEHOLDER, default_name, make_default_folder, model_title, outputs
from run_folder.entries import CHECKPOINTS, OOM, RUN_ENTRIES, WANDB_RUN, entries_of, held_entries, made_entries
from run_folder.final_copy import copied_entries
from run_folder.inputs import inputs_of
from run_folder.lock import RunLock, find_dead
from run_folder.other_runs import checkpoint_root_of
from run_folder.refusals import check_checkpoints, check_entries, check_in_no_run, check_inputs_stay, check_writable
from run_folder.resuming import find_checkpoints, incomplete_after
from run_folder.run_yaml import (
    NAME,
    add_to_run_yaml,
    is_cut,
    is_of_a_run,
    read_run_yaml,
    resumes_in,
    saved_in,
    write_run_yaml,
)
from utils.atomic_write import FileWriteError
from utils.errors import ConfigError

Stamps = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, its checkpoints included. Only `take` writes."""

    path: Path  # ends in a placeholder if --output_dir was not given, until `take` has made the folder
    name: str  # of a default folder, without the time
    is_given: bool  # by --output_dir
    entries: tuple[str, ...]  # names of what the run writes here
    resume: str | None  # as given: "auto" or a path; None if the run starts afresh
    overwrite: bool
    restarted: bool  # by the job's launcher
    checkpoints_elsewhere: Path | None  # the folder of the checkpoints, if --dist_checkpoint_root_folder was given
    root_folder: Path | None  # --dist_checkpoint_root_folder itself
    saves_copy: bool  # of the final state, into `checkpoints_elsewhere`
    profiler: Path | None  # --profiler_dir
    inputs: tuple[tuple[str, str], ...]  # flag and path, or pattern, of what the run reads
    checkpoints: tuple[Path, ...] = ()  # to try to resume from, in this order; see `look`
    stamps: Stamps | None = None  # of what another run would change here; see `look`

    @classmethod
    def plan(cls, config: RunConfig, env: Environment) -> RunFolder:
        """The folder of a run with these settings, of which --resume is settled (`run_folder.resuming`)."""
        train, tracking = config.train_config, config.tracking_config
        root = Path(train.dist_checkpoint_root_folder) if train.dist_checkpoint_root_folder else None
        elsewhere = None
        if root:  # with the model's name, as llama-recipes does
            elsewhere = root / f"{train.dist_checkpoint_folder}-{model_title(train.model_name)}"
        return cls(
            path=Path(train.output_dir) if train.output_dir else outputs(env) / PLACEHOLDER,
            name=default_name(train.model_name, train.datasets),
            is_given=bool(train.output_dir),
            entries=tuple(entries_of(config.to_dict())),
            resume=train.resume or None,
            overwrite=train.overwrite,
            restarted=env.restarted,
            checkpoints_elsewhere=elsewhere,
            root_folder=root,
            saves_copy=elsewhere is not None and train.save_model,
            profiler=Path(tracking.profiler_dir) if tracking.profiler_dir else None,
            inputs=tuple(inputs_of(config)),
        )

    @property
    def checkpoint_root(self) -> Path:
        """The folder of the checkpoints."""
        return self.checkpoints_elsewhere or self.path / CHECKPOINTS

    @property
    def _root_flag(self) -> str:
        return "--dist_checkpoint_folder" if self.checkpoints_elsewhere else "--output_dir"

    @property
    def _own_roots(self) -> list[Path]:
        """Folders that may hold a resumed run's checkpoints: its own, and those of its earlier sessions."""
        return [self.checkpoint_root, checkpoint_root_of(self.path), self.path / CHECKPOINTS] if self.is_given else []

    def check_usable(self, *, is_rank_zero: bool) -> None:
        """Refuse folders that cannot be written or are in use by another run. Writes nothing.

        Raises:
            ConfigError: with the remedy.
        """
        check_writable("--output_dir", self.path)
        if self.root_folder:
            check_writable("--dist_checkpoint_root_folder", self.root_folder)
        check_writable(self._root_flag, self.checkpoint_root)
        if self.profiler:
            check_writable("--profiler_dir", self.profiler)
        # A lock's owner of before a restart has died with the job. Only rank 0's machine can see that.
        if is_rank_zero or not self.restarted:
            if self.is_given:
                find_dead("--output_dir", self.path)
            if self.checkpoints_elsewhere:
                find_dead(self._root_flag, self.checkpoint_root)

    def look(self) -> RunFolder:
        """This folder with the checkpoints and the stamps that are found there. Writes nothing.

        Raises:
            ConfigError: if the run would delete or replace what no run wrote, or what it reads itself, or if there is
                nothing to resume from.
        """
        self.check(afresh=self.resume is None)
        # Before the checkpoints are listed: `take` must notice one that another run writes right after that.
        stamps = self._stamps()
        found: list[Path] = []
        if self.resume is not None:
            run = self.path if self.is_given else None
            found = find_checkpoints(self.resume, run, self._own_roots, restarted=self.restarted)
            self.check(afresh=not found)
        return replace(self, checkpoints=tuple(found), stamps=stamps)

    def check(self, *, afresh: bool) -> None:
        """Refuse to delete or replace what no run wrote, or what this run reads. Writes nothing.

        Args:
            afresh: whether the run goes on from no checkpoint, so that it deletes what an earlier run left there.

        Raises:
            ConfigError: with the remedy.
        """
        # docs/decisions.md, "Markers, not names, say who owns a file".
        check_in_no_run("--output_dir", self.path, own=self.path)
        check_in_no_run("--dist_checkpoint_folder", self.checkpoint_root, own=self.path)
        resumes = self.resume is not None
        check_entries(self.path, self.entries, afresh=afresh, overwrite=self.overwrite, resumes=resumes)
        check_checkpoints(
            self.checkpoint_root,
            self._root_flag,
            is_elsewhere=self.checkpoints_elsewhere is not None,
            holds_copy=self.saves_copy,
            afresh=afresh,
            overwrite=self.overwrite,
            resumes=resumes,
        )
        check_inputs_stay(self.inputs, self._replaced())

    def incomplete_after(self, taken: Path | None, step: int) -> list[Path]:
        """The incomplete checkpoints that are newer than the one taken; all of them if the run starts afresh.

        Args:
            taken: the checkpoint that the run goes on from, which is that of `step`.
        """
        return [] if self.resume is None else incomplete_after(self.resume, self._own_roots, taken, step)

    def take(
        self,
        lock: RunLock,
        config: RunConfig,
        env: Environment,
        *,
        resolved: dict[str, Any],
        description: dict[str, dict[str, Any]],
        resumed: dict[str, Any] | None = None,
        trains: bool = True,
    ) -> RunFolder:
        """Make the folder, hold it, and write run.yaml, or go on with those that are there. Call this on rank 0 alone.

        Without a checkpoint to go on from, what an earlier run wrote is deleted, as --overwrite asks. If --resume auto
        found no checkpoint, saved weights stay until new ones replace them.

        Args:
            lock: holds the folder before anything is checked again, deleted or written.
            resolved: the settings with their defaults decided.
            description: other sections of run.yaml.
            resumed: run.yaml's entry of the resume; None if the run starts afresh.
            trains: False if the run that is resumed has made all its steps: its run.yaml stays.

        Returns:
            The folder with its real path.

        Raises:
            ConfigError: if another run uses the folder or has written there since `look`, if files of others would be
                lost, or if the file system refuses.
        """
        folder = self.path
        try:
            if not self.is_given:
                folder = make_default_folder(folder.parent, self.name)
            taken = replace(self, path=folder)
            lock.take("--output_dir", folder)
            if self.checkpoints_elsewhere:
                lock.take(self._root_flag, self.checkpoints_elsewhere)
            if self.stamps is not None and self._stamps() != self.stamps:
                raise ConfigError(
                    f"--output_dir: another run wrote into {folder} while this one was loading; give the same command "
                    "again"
                )
            # Again, since the first check ran before the lock was held.
            taken.check(afresh=resumed is None)
            made = made_entries(folder)
            earlier = taken._clear(made) if resumed is None else taken._go_on(resumed)
            held = held_entries(folder)
            entries = [name for name in RUN_ENTRIES if name in self.entries or (name in made and name in held)]
            before = {} if trains or NAME not in held else read_run_yaml(folder)
            if not is_of_a_run(before) or is_cut(before):
                write_run_yaml(
                    folder,
                    config,
                    env,
                    resolved=resolved,
                    description=description,
                    entries=entries,
                    checkpoints=self.checkpoints_elsewhere,
                    earlier=earlier,
                )
            elif set(entries) - set(made):  # or the next session would take them for someone else's
                add_to_run_yaml(folder, entries=entries)
        except FileWriteError as error:
            raise ConfigError(
                f"--output_dir: {error.filename} cannot be written ({error.strerror}); give a folder that can"
            ) from error
        except OSError as error:
            raise ConfigError(f"--output_dir: {folder} cannot be written ({error}); give a folder that can") from error
        return taken

    def _stamps(self) -> Stamps:
        """Stamps of the files that change if a run begins in these folders, or writes a checkpoint there."""
        return tuple(_stamp(file) for file in (self.path / NAME, self.checkpoint_root / "latest"))

    def _replaced(self) -> Iterator[Path]:
        """The paths that this run writes, replaces or deletes."""
        names = {*self.entries, *made_entries(self.path)} - {CHECKPOINTS}
        yield from (self.path / name for name in names)
        for place in {self.checkpoint_root, self.path / CHECKPOINTS}:
            for path in place.iterdir() if place.is_dir() else ():
                if is_ours(path) or is_step_folder(path):
                    yield path
        if self.saves_copy:
            yield from copied_entries(self.checkpoint_root)

    def _clear(self, made: list[str]) -> dict[str, Any]:
        """Delete an earlier run's entries. run.yaml lists them, so it stays until the new one replaces it: a run that
        is killed meanwhile can be cleared again."""
        for root in {self.checkpoint_root, self.path / CHECKPOINTS}:
            remove_all(root)  # or the first restart of this run would resume from them
        kept = (NAME, CHECKPOINTS) if self.overwrite else (NAME, CHECKPOINTS, "model", "adapter")
        for path in (self.path / name for name in made if name not in kept):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return {}

    def _go_on(self, resumed: dict[str, Any]) -> dict[str, Any]:
        """Delete only entries that every session replaces. Returns the earlier sessions' entries for run.yaml."""
        before = read_run_yaml(self.path) if (self.path / NAME).is_file() else {}
        (self.path / OOM).unlink(missing_ok=True)
        texts = {name: before.get(name) for name in ("started", WANDB_RUN)}
        kept: dict[str, Any] = {name: text for name, text in texts.items() if isinstance(text, str)}
        if saved := saved_in(before):
            kept["saved"] = dict(saved)
        return kept | {"resumed": [*resumes_in(before), resumed]}


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
