"""Turns an out-of-memory error into the account that ends the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import shlex
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from configs.changed_flags import changed_flags
from configs.flags import parse_flags
from configs.run import RunConfig
from planning.alternatives.less_memory import Change, cheapest, device_changes, host_changes
from planning.out_of_memory.failure_scene import FailedLayer, batch_of, largest_module, layer_of, phase_of, stack_of
from planning.out_of_memory.memory_account import NUM_LARGEST, MemoryAccount, Suggestion, suggestion_lines
from planning.out_of_memory.predicted import Decided, figures_on_cpu, plans_for
from ranks.environment import Environment, launch_command
from reporting.memory_ledger import MemoryLedger, bytes_by_name
from reporting.report.page import write_at_end
from run_folder.checkpoint_folder import checkpoints
from run_folder.entries import OOM, PLAN
from run_folder.other_runs import checkpoint_root_of
from utils.atomic_write import write_atomically
from utils.errors import RunError
from utils.host_memory import read_host_memory
from utils.memory_errors import EXPANDABLE_SEGMENTS, AllocatorFigures, allocator_figures, grows_segments, what_ran_out
from utils.small_files import read_json
from utils.units import GIB

RESERVE_BYTES = 2**26
_UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Where = Callable[[], tuple[int, str]]
"""Tells the step that the main thread is at, and its activity (`supervision.main_thread.Position`)."""


class OutOfMemory(RunError):
    """Memory has run out on this rank. `parts` tells the account, and then the suggested commands."""

    def __init__(
        self,
        account: MemoryAccount,
        suggest: Callable[[], list[Suggestion]],
        folder: Path | None,
        write_page: Callable[[Path], str] | None,
    ) -> None:
        """
        Args:
            write_page: writes the page about the run in its folder, and returns a line that says so; None: none is
                asked for.
        """
        super().__init__(account.lines()[0], "\n".join(account.lines()[1:]))
        self.account, self.suggest, self.folder, self.write_page = account, suggest, folder, write_page

    def parts(self) -> Iterator[str]:
        """The account at once, then suggestions, which may take seconds to plan. Both go to oom.json and the page."""
        written = self._write([])
        yield "\n".join([*self.account.lines(), written] if written else self.account.lines())
        suggestions = self.suggest()
        lines = suggestion_lines(suggestions)
        if self._write(suggestions) and self.write_page is not None and self.folder is not None:
            lines.append(self.write_page(self.folder))
        yield "\n".join(lines)

    def _write(self, suggestions: Sequence[Suggestion]) -> str:
        """Write oom.json, if there is a run folder that this rank sees; returns a line that says so."""
        if self.folder is None or not self.folder.is_dir():
            return ""
        path = self.folder / OOM
        contents = self.account.to_dict() | {"changes": [suggestion.to_dict() for suggestion in suggestions]}
        try:
            write_atomically(path, json.dumps(contents, indent=1) + "\n")
        except OSError as error:
            return f"  {error}"
        return f"  {'this account':<14} {path}"


class OutOfMemoryReport:
    """A context around a run: an out-of-memory error leaves it as OutOfMemory."""

    def __init__(self, argv: Sequence[str], config: RunConfig, env: Environment, where: Where) -> None:
        """
        Args:
            argv: the run's flags.
        """
        self.argv, self.config, self.env, self.where = list(argv), config, env, where
        # Address space of a CPU for the account, given back when memory has run out. Nothing touches it meanwhile: a
        # bytearray of this size would be written to, which makes its pages resident and takes as long as a refusal.
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, flags=_UNTOUCHED) if env.device.type == "cpu" else None
        self.ledger: MemoryLedger | None = None
        self.folder: Path | None = None
        self.decided = Decided()

    def knows(
        self,
        ledger: MemoryLedger,
        folder: Path,
        decided: Decided,
        batch_flags: Sequence[str],
    ) -> None:
        """Take the facts of the run that are known once it is loaded.

        Args:
            batch_flags: flags of the batches that it chose.
        """
        if batch_flags:
            self.argv = changed_flags(self.argv, batch_flags)
            self.config = parse_flags(self.argv)
        self.ledger, self.folder, self.decided = ledger, folder, decided

    def __enter__(self) -> OutOfMemoryReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        whose = None if error is None or isinstance(error, RunError) else what_ran_out(error)
        if error is not None and whose is not None:
            self._reserve = None
            try:
                account = self._account(error, whose)
            except Exception as mistake:  # the error itself says more than a mistake of this account
                error.add_note(f"no account of the memory could be made: {mistake!r}")
                return
            if self.env.device.type == "cpu":  # the frames hold activations, whose memory the suggestions' plans need
                traceback.clear_frames(trace)
            # The page that the run's end wrote has no account yet, and only rank 0 wrote one.
            write_page = write_at_end if self.config.tracking_config.report else None
            raise OutOfMemory(account, lambda: self._suggestions(account), self.folder, write_page) from error

    def _account(self, error: BaseException, whose: str) -> MemoryAccount:
        frames, ledger = stack_of(error), self.ledger
        step, activity = self.where()
        phase = phase_of(frames, activity, ledger.phase if ledger else "")
        model = ledger.model if ledger else largest_module(frames)
        layer: FailedLayer | None = layer_of(frames, model) if model is not None else None
        by_name: Mapping[str, Mapping[str, int]] = {}
        held: Mapping[str, int] = {}
        if ledger is not None:
            by_name, held = ledger.by_name(), ledger.held()
        elif model is not None:
            kind = self.env.device.type
            by_name = {"params": bytes_by_name([*model.named_parameters(), *model.named_buffers()], kind)}
            held = {"params": sum(by_name["params"].values())}
        figures, retries = AllocatorFigures(), 0
        if whose == "device":
            figures, retries = self._figures(error)
        return MemoryAccount(
            whose=whose,
            rank=self.env.rank,
            world_size=self.env.world_size,
            host=socket.gethostname(),
            phase=phase,
            step=step,
            layer=layer,
            batch=batch_of(frames),
            figures=figures,
            num_alloc_retries=retries,
            parts=self._parts(phase, figures, held),
            largest={
                owner: sorted(sizes.items(), key=lambda item: -item[1])[:NUM_LARGEST]
                for owner, sizes in by_name.items()
            },
            host_figures=_host_figures() if whose == "host" else {},
            plan=read_plan(self.folder),
            error=" ".join(str(error).split())[:300] or type(error).__name__,
        )

    def _figures(self, error: BaseException) -> tuple[AllocatorFigures, int]:
        """The allocator's figures from the error, missing ones as they are now, and how often it freed its cache."""
        figures, retries = allocator_figures(error), 0
        if self.ledger is not None and self.ledger.has_allocator:
            allocated, _, reserved, retries = self.ledger.allocator()
            if figures.allocated is None:
                figures = replace(figures, allocated=allocated, unused=int(reserved) - allocated)
        if figures.capacity is None and self.env.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # after some errors CUDA answers nothing more
                free, capacity = torch.cuda.mem_get_info(self.env.device)
                figures = replace(figures, free=free, capacity=capacity)
        if figures.capacity is not None and figures.reserved is not None and figures.free is not None:
            figures = replace(figures, free=max(0, min(figures.free, figures.capacity - figures.reserved)))
        return figures, retries

    def _parts(self, phase: str, figures: AllocatorFigures, held: Mapping[str, int]) -> dict[str, int]:
        """The allocated bytes, split as in a `memory` event."""
        if figures.allocated is None:
            return {}
        params, grads, optimizer = (held.get(owner, 0) for owner in ("params", "grads", "optimizer"))
        rest = max(0, figures.allocated - params - grads - optimizer)  # the text of an error has rounded figures
        activations = 0
        if self.ledger is not None and phase in ("forward", "backward"):
            # Gradients came after that mark, too, and are counted apart.
            added = figures.allocated - self.ledger.allocated_before_forward - grads
            activations = max(0, min(rest, added))
        return {
            "params": params,
            "grads": grads,
            "optimizer": optimizer,
            "activations": activations,
            "other": rest - activations,
        }

    def _suggestions(self, account: MemoryAccount) -> list[Suggestion]:
        is_cpu = self.env.device.type == "cpu"
        of_host = host_changes(self.config, is_cpu=is_cpu)
        if account.whose == "host" and not is_cpu:
            found = cheapest(of_host, self.argv, account.phase, None)
        else:
            changes = device_changes(
                self.config, account.phase, self.env.world_size, is_cpu=is_cpu, checkpointing=self.decided.checkpointing
            )
            if account.is_fragmented and not grows_segments():
                unused = (account.figures.unused or 0) / GIB
                whole = Change("an allocator with growing segments", environment=EXPANDABLE_SEGMENTS, saves_gib=unused)
                changes = itertools.chain([whole], changes)
            if account.whose == "host":  # a CPU's own memory
                changes = itertools.chain(changes, of_host)
            found = self._cheapest(changes, account)
        return [Suggestion(change, self._command(change)) for change in found]

    def _cheapest(self, changes: Iterable[Change], account: MemoryAccount) -> list[Change]:
        """With figures, if such runs can be planned."""
        changes = list(changes)
        try:
            figures = account.figures if account.whose == "device" else figures_on_cpu(account.host_figures)
            plans = plans_for(self.config, self.env, figures, account.phase, account.batch, self.decided)
            return cheapest(changes, self.argv, account.phase, plans)
        except Exception:  # a plan that cannot be made must not hide the account
            return cheapest(changes, self.argv, account.phase, None)

    def _command(self, change: Change) -> str:
        """The user's command with the change, so that it runs as it is: it goes on where there is a checkpoint."""
        train, folder = self.config.train_config, self.folder
        flags, without = list(change.flags), []
        if folder is not None:
            saved = any(checkpoints(checkpoint_root_of(folder)))
            if saved and not change.keeps_result:
                flags += ["--output_dir", _free_folder(folder)]
                # Another result gets another folder: --resume would be refused, and --overwrite would delete the
                # checkpoints.
                without = ["--resume", "--overwrite"]
            elif saved or train.output_dir:
                flags += ["--output_dir", train.output_dir or str(folder), "--resume", "auto"]
                without = ["--overwrite"]
        launcher = launch_command(self.env, self.argv)
        # The launcher's own words: its command ends with the run's flags.
        words = shlex.split(launcher)[: len(shlex.split(launcher)) - len(self.argv)]
        variables = [f"{name}={value}" for name, value in change.environment.items()]
        return shlex.join(
            [*(["env", *variables] if variables else []), *words, *changed_flags(self.argv, flags, without=without)]
        )


def _host_figures() -> dict[str, float]:
    """This process's resident memory, and what there is, in GiB."""
    memory = read_host_memory()
    sizes = {
        "resident": psutil.Process().memory_info().rss,
        "limit": memory.limit,
        "used": memory.used,
        "available": memory.available,
        "total": memory.total,
    }
    return {name: size / GIB for name, size in sizes.items() if size is not None}


def read_plan(folder: Path | None) -> dict[str, Any] | None:
    """The plan in a run's folder, if there is one that can be read."""
    if folder is None:
        return None
    try:
        plan = read_json(folder / PLAN)
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) and "peak_gib" in plan else None


def _free_folder(folder: Path) -> str:
    """A free name next to the folder."""
    number = 2
    while (place := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return str(place)
