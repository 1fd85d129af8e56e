"""When a checkpoint is written, and how little the loop is held up by it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpointing.finding import Checkpoint
from checkpointing.folder import STATE, checkpoints, give_up_after, remove_leftovers, step_folder
from checkpointing.host_copy import HostCopy, has_room
from checkpointing.sharded_copy import save_copy
from checkpointing.state import (
    TrainState,
    model_tensors,
    optimizer_numbers,
    optimizer_tensors_by_name,
)
from checkpointing.writing import CheckpointError, Contents, num_bytes, write_checkpoint
from configs.run import RunConfig
from configs.training import DEFAULT_KEEP_LAST
from policies.loss_scaling import LossScaler
from policies.optimizers.build import state_bytes
from reporting.run_folder import checkpoint_root
from utils.distributed import gather_to_all, local_tensor, new_host_group, on_rank_zero
from utils.environment import Environment
from utils.errors import ConfigError
from utils.progress import phase_begins
from utils.seeding import rng_state
from utils.units import readable


@dataclass
class _Save:
    """One that was begun."""

    step: int
    blocked_seconds: float
    future: Future[tuple[int, float]]  # bytes, seconds


class CheckpointSaver:
    """Writes the run's checkpoints. All methods but `due_by_time` are called by every rank alike.

    A save that fails is said, and the run goes on: the next one tries again. One save at a time is in flight.
    """

    def __init__(
        self,
        config: RunConfig,
        env: Environment,
        root: Path,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        scaler: LossScaler,
        facts: Mapping[str, Any],
        files: Mapping[str, bytes],
        keep_last: int,
        runs_beside: bool,
        say: Callable[[str], None],
        write_event: Callable[..., None],
    ) -> None:
        """
        Args:
            root: where the checkpoints are.
            facts: what state.json holds beside the state: what a resumed run must have in common with this one.
            files: small ones that every checkpoint carries, by their paths in it.
            runs_beside: whether training goes on while a checkpoint is written.
            say: prints a line on rank 0. write_event: writes a line of metrics.jsonl there.
        """
        self.config, self.env, self.root = config, env, root
        self.model, self.optimizer, self.scheduler, self.scaler = model, optimizer, scheduler, scaler
        self.facts, self.files, self.keep_last = facts, files, keep_last
        self.say, self.write_event = say, write_event
        self.full = config.fsdp_config.checkpoint_type == "FULL_STATE_DICT"
        self.group = new_host_group()
        self.runs_beside = runs_beside
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._host_copy = HostCopy()
        self._room: Future[None] | None = None  # made for that copy
        self._in_flight: _Save | None = None
        self._last_began = time.monotonic()
        self.tried_step = self.saved_step = -1

    def begin(self, resumed: Checkpoint | None) -> None:
        """Before the first step: what the run goes on from counts as saved, and no leftovers stay on the disk."""
        if resumed is not None and resumed.folder.parent.resolve() == self.root.resolve():
            self.tried_step = self.saved_step = resumed.step
        on_rank_zero(lambda: remove_leftovers(self.root))
        if resumed is not None:
            on_rank_zero(lambda: give_up_after(self.root, resumed.step))

    def due(self, step: int, *, ends_epoch: bool, ends_run: bool) -> bool:
        """Whether --save_every_steps wants one after this step: every so many, and at the run's end, for a run that
        goes on from there; or, unset, at each epoch's end."""
        every = self.config.train_config.save_every_steps
        if every is None:
            return ends_epoch
        return is_due(step, every) or (every > 0 and ends_run)

    def due_by_time(self) -> bool:
        """Whether --save_every_minutes wants one now; by rank 0's clock, which it has to tell the others."""
        minutes = self.config.train_config.save_every_minutes
        return self.env.is_rank_zero and minutes > 0 and time.monotonic() - self._last_began > 60 * minutes

    def save(self, state: TrainState, *, best: bool = False) -> None:
        """Write a checkpoint of the run as it is now; returns as soon as training may go on."""
        began = time.monotonic()
        self.wait()
        if self.saved_step == state.step and not best:
            return
        self._last_began, self.tried_step = time.monotonic(), state.step
        phase_begins(f"saving a checkpoint of step {state.step}")
        tensors = self._tensors()
        if self.full:
            tensors = _gathered(tensors)
        elif self.runs_beside:
            tensors = self._copied(tensors)
        files = {STATE: self.state_json(state), **self.files}
        contents = Contents(tensors, full=self.full, rng=rng_state(), files=files)
        folder = step_folder(self.root, state.step)
        write = partial(write_checkpoint, folder, contents, group=self.group, keep_last=self.keep_last, best=best)
        future: Future[tuple[int, float]] = self._thread.submit(_timed, write)
        if not self.runs_beside:
            future.exception()  # wait for the end, whichever it is
        self._in_flight = _Save(state.step, time.monotonic() - began, future)
        if not self.runs_beside:
            self.wait()

    def after_step(self) -> None:
        """Tell of a save that has ended. Rank 0 alone sees when: nothing here is agreed upon.

        After the first step, when the optimizer has its states, host memory is prepared for a copy, beside training.
        """
        if self.runs_beside and not self.full and self._room is None:
            self._room = self._thread.submit(self._host_copy.prepare, self._tensors())
        if self._in_flight is not None and self._in_flight.future.done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save in flight; whether the last that was tried is complete, the same on every rank."""
        save, self._in_flight = self._in_flight, None
        if save is not None:
            try:
                size, seconds = save.future.result()
                self.saved_step = save.step
                self.write_event(step=save.step, seconds=seconds, blocked_seconds=save.blocked_seconds, bytes=size)
                self.say(
                    f"checkpoint | step {save.step} | {readable(size)} in {seconds:.1f} s, training waited "
                    f"{save.blocked_seconds:.2f} s"
                )
            except CheckpointError as error:
                self.say(
                    f"checkpoint of step {save.step} failed: {error}; the run goes on, and the next one tries again"
                )
        return self.saved_step == self.tried_step

    def save_copy(self, state: TrainState) -> bool:
        """Leave the final model in the checkpoints' folder itself, as --dist_checkpoint_root_folder asks.

        Returns:
            Whether it is there, the same on every rank.
        """
        self.wait()
        phase_begins("saving a copy of the final weights")
        has_optimizer = self.config.train_config.save_optimizer
        tensors = model_tensors(self.model, every_name=True)
        if has_optimizer:
            tensors |= optimizer_tensors_by_name(self.model, self.optimizer)
        files = {STATE: self.state_json(state, has_optimizer=has_optimizer), **self.files}
        try:
            save_copy(self.root, _gathered(tensors) if self.full else tensors, files, full=self.full)
        except CheckpointError as error:
            self.say(f"copy of the final weights: {self.root} cannot be written: {error}")
            return False
        self.say(f"copy of the final weights: {self.root}")
        return True

    def close(self) -> None:
        """After the last save."""
        self.wait()
        self._thread.shutdown()
        self._host_copy.close()

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy in host memory; where there is no more room for one the tensors themselves, and training waits."""
        try:
            if self._room is not None:
                self._room.result()
            return self._host_copy.take(tensors)
        except (MemoryError, RuntimeError) as error:
            self.runs_beside = False
            self._host_copy.close()
            self.say(f"async_save: False from now on: {' '.join(str(error).split())[:200]}")
            return tensors

    def _tensors(self) -> dict[str, torch.Tensor]:
        return model_tensors(self.model) | optimizer_tensors_by_name(self.model, self.optimizer)

    def state_json(self, state: TrainState, *, has_optimizer: bool = True) -> bytes:
        values = {
            "state": state.to_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loss_scaler": self.scaler.state_dict(),
            "optimizer_numbers": optimizer_numbers(self.model, self.optimizer),
            "has_optimizer": has_optimizer,
            "world_size": self.env.world_size,
            **self.facts,
        }
        return json.dumps(values, indent=1).encode()


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps, or never where that is 0, happens after this one."""
    return every > 0 and step % every == 0


def _timed(write: Callable[[], int]) -> tuple[int, float]:
    started = time.monotonic()
    return write(), time.monotonic() - started


def _gathered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors in rank 0's host memory, nothing elsewhere. Every rank must call this."""
    is_rank_zero, whole = dist.get_rank() == 0, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            # Shards may be in host memory, where the mesh's backend gathers nothing.
            tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
        if is_rank_zero:
            whole[name] = tensor.to("cpu", copy=True)
    return whole


def planned_bytes(model: nn.Module, config: RunConfig, *, local: bool = False) -> int:
    """Of the tensors of a checkpoint: the model's, and what the optimizer will hold after its first step.

    Args:
        local: this rank's part of them alone.
    """

    def size(tensor: torch.Tensor) -> int:
        return local_tensor(tensor).nbytes if local else tensor.numel() * tensor.element_size()

    trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    states = sum(state_bytes(p, config.train_config, config.fsdp_config, local=local) for p in trained)
    return sum(map(size, model_tensors(model).values())) + states


def choose_async(config: RunConfig, env: Environment, model: nn.Module) -> tuple[bool, list[str]]:
    """Whether checkpoints are written beside training, and lines to print. Every rank must call this.

    Raises:
        ConfigError: on every rank, where --async_save was given and host memory has no room for a copy of the state.
    """
    asked, full = config.train_config.async_save, config.fsdp_config.checkpoint_type == "FULL_STATE_DICT"
    if asked is False or (asked is None and env.device.type == "cpu"):
        return False, []
    size = planned_bytes(model, config, local=not full)
    fits = all(gather_to_all(has_room(size, num_copies=1 if full else env.local_world_size)))
    if not fits and asked:
        raise ConfigError(
            f"--async_save: needs {readable(size)} of free host memory per rank for a copy of the state; "
            "leave it out to save while training waits"
        )
    if not fits:
        return False, [
            f"async_save: False, since {readable(size)} of host memory per rank are not free; training waits while "
            "checkpoints are written"
        ]
    return True, []


def choose_keep_last(config: RunConfig, model: nn.Module) -> tuple[int, list[str]]:
    """How many checkpoints the disk has room for, up to --keep_last, and lines to print. Reads the disk.

    Raises:
        ConfigError: where it has not even room for one beside the one being written, or for --keep_last where given.
    """
    train = config.train_config
    if train.save_every_steps == 0 and not train.save_every_minutes:
        return train.keep_last or DEFAULT_KEEP_LAST, []
    root = existing = checkpoint_root(train, Path(train.output_dir or "outputs").expanduser())
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    size = planned_bytes(model, config)
    export = (
        2 * num_bytes(model_tensors(model)) if train.save_model else 0
    )  # an earlier one stays until the new is whole
    held = len(checkpoints(root))
    extra = 2 if train.keep_best else 1  # the one being written, and the best
    most, fewest = train.keep_last or DEFAULT_KEEP_LAST, train.keep_last or 1
    for keep_last in range(most, fewest - 1, -1):
        if max(1, keep_last + extra - held) * size + export <= free:
            if keep_last == most:
                return keep_last, []
            return keep_last, [
                f"keep_last: {keep_last}: {root} has {readable(free)} free, a checkpoint needs {readable(size)}"
            ]
    raise ConfigError(
        f"--keep_last: {fewest} and {extra} more of {readable(size)} each and {readable(export)} of weights do "
        f"not fit on the disk of {root}, which has {readable(free)} free; free some, give another --output_dir, or "
        "--save_every_steps 0 --save_every_minutes 0 to write no checkpoints"
    )
