"""When and how a run will write checkpoints, decided before it starts by the room in host memory and on the disk."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from torch import nn

from checkpointing.host_copy import has_room
from checkpointing.trained import model_tensors
from checkpointing.writing import num_bytes
from configs.fsdp import FsdpConfig
from configs.train_settings.results import DEFAULT_KEEP_LAST
from configs.training import TrainConfig
from policies.optimizers.build import state_bytes
from ranks.agreement import named
from ranks.collectives import gather_to_all, on_rank_zero
from ranks.environment import Environment
from run_folder.checkpoint_folder import checkpoints
from utils.errors import ConfigError
from utils.local_tensors import local_tensor
from utils.units import readable


@dataclass(frozen=True)
class SavePlan:
    """When and how checkpoints are written."""

    every_steps: int | None  # None: at the end of each epoch; 0: never by steps
    every_minutes: float  # 0: never by time
    full: bool  # one file, gathered on rank 0; else each rank writes its shards
    keep_last: int
    beside_training: bool  # training goes on while one is written
    num_bytes: int  # of one checkpoint
    copies_optimizer: bool  # into the copy of the final state (--dist_checkpoint_root_folder)

    @property
    def saves(self) -> bool:
        """Whether any checkpoint is due in the run, unless it is asked for or the best."""
        return self.every_steps != 0 or self.every_minutes > 0

    def due(self, step: int, *, ends_epoch: bool, ends_run: bool) -> bool:
        """Whether a checkpoint is due by steps after this one: every `every_steps`, and at the end of the run, so that
        a longer run can go on from there; without --save_every_steps at the end of each epoch."""
        if self.every_steps is None:
            return ends_epoch
        return is_due(step, self.every_steps) or (self.every_steps > 0 and ends_run)


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens after this one; 0 is never."""
    return every > 0 and step % every == 0


def plan_saves(
    model: nn.Module, train: TrainConfig, fsdp: FsdpConfig, root: Path, env: Environment
) -> tuple[SavePlan, list[str]]:
    """The plan, and lines to print about adapted defaults. Every rank must call this.

    Args:
        root: the folder of the run's checkpoints, which need not exist yet.

    Raises:
        ConfigError: on every rank, if memory or disk have no room for the settings that were given.
    """
    size = planned_bytes(model, train, fsdp)
    keep_last, disk_notes = on_rank_zero(lambda: _choose_keep_last(model, train, root, size))
    full, has_place, place_notes = _choose_place(train, fsdp, root, size, env)
    beside_training, memory_notes = _choose_async(model, train, fsdp, env, full=full)
    plan = SavePlan(
        every_steps=train.save_every_steps if has_place else 0,
        every_minutes=train.save_every_minutes if has_place else 0,
        full=full,
        keep_last=keep_last,
        beside_training=beside_training,
        num_bytes=size,
        copies_optimizer=train.save_optimizer,
    )
    return plan, disk_notes + place_notes + memory_notes


def planned_bytes(model: nn.Module, train: TrainConfig, fsdp: FsdpConfig, *, local: bool = False) -> int:
    """Bytes of a checkpoint's tensors: the model's, and those that the optimizer will have after its first step.

    Args:
        local: only of this rank's part of them.
    """

    def size(tensor: torch.Tensor) -> int:
        return local_tensor(tensor).nbytes if local else tensor.numel() * tensor.element_size()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = sum(state_bytes(parameter, train, fsdp, local=local) for parameter in trained)
    return sum(map(size, model_tensors(model).values())) + states


def _choose_place(
    train: TrainConfig, fsdp: FsdpConfig, root: Path, size: int, env: Environment
) -> tuple[bool, bool, list[str]]:
    """Whether a checkpoint is gathered and written by rank 0, whether any is written, and lines to print.

    Nodes that share no disk send their shards to rank 0: a checkpoint is then whole, on one node. Every rank must call
    this.

    Raises:
        ConfigError: on every rank, if rank 0's node has no room for it in host memory, unless nothing is to be saved.
    """
    if fsdp.checkpoint_type == "FULL_STATE_DICT":
        return True, True, []
    blind = ranks_without(root, env)
    if not blind:
        return False, True, []
    why = f"{named(blind)} do{'es' * (len(blind) == 1)} not see the disk of {root}"
    if on_rank_zero(lambda: has_room(size, 1)):
        how = f"gathered and written by rank 0 on {socket.gethostname()} alone (as FULL_STATE_DICT)"
        return True, True, [f"checkpoints: {how}, since {why}"]
    no_room = f"{why}, and the host memory of rank 0 has no room to gather {readable(size)} for it"
    if train.save_model:
        raise ConfigError(
            f"--output_dir: the run could not be saved: {no_room}; give a folder that all nodes share, or "
            "--save_model False to train without checkpoints and results"
        )
    return True, False, [f"checkpoints: none, since {no_room}"]


def ranks_without(root: Path, env: Environment) -> list[int]:
    """The ranks that do not see rank 0's files in a folder, which need not exist. Every rank must call this.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write there.
    """
    if env.world_size == env.local_world_size:  # one machine sees one disk
        return []
    probe = on_rank_zero(lambda: _write_probe(root))
    seen = gather_to_all(os.path.exists(probe))
    on_rank_zero(lambda: probe.unlink(missing_ok=True))
    return [rank for rank, sees in enumerate(seen) if not sees]


def _write_probe(root: Path) -> Path:
    existing = root
    while not existing.is_dir():
        existing = existing.parent
    probe = existing / f".who-sees-this-{uuid4().hex}"
    try:
        probe.touch()
    except OSError as error:
        raise ConfigError(f"--output_dir: {existing} cannot be written ({error}); give a folder that can") from error
    return probe


def _choose_async(
    model: nn.Module, train: TrainConfig, fsdp: FsdpConfig, env: Environment, *, full: bool
) -> tuple[bool, list[str]]:
    """Whether training goes on while checkpoints are written, and lines to print. Every rank must call this.

    Raises:
        ConfigError: on every rank, if --async_save was given and host memory has no room for a copy of the state.
    """
    asked = train.async_save
    if asked is False or (asked is None and env.device.type == "cpu"):
        return False, []
    size = planned_bytes(model, train, fsdp, local=not full)
    num_copies = 1 if full else env.local_world_size
    if all(gather_to_all(has_room(size, num_copies))):
        return True, []
    if asked:
        raise ConfigError(
            f"--async_save: needs {readable(size)} of free host memory per rank for a copy of the state; "
            "leave it out to save while training waits"
        )
    return False, [
        f"async_save: False, since {readable(size)} of host memory per rank are not free; training waits while "
        "checkpoints are written"
    ]


def _choose_keep_last(model: nn.Module, train: TrainConfig, root: Path, size: int) -> tuple[int, list[str]]:
    """How many checkpoints of that size the disk has room for, up to --keep_last, and lines to print.

    Raises:
        ConfigError: if it has no room for one besides the one being written, or for --keep_last if that was given.
    """
    most, fewest = train.keep_last or DEFAULT_KEEP_LAST, train.keep_last or 1
    if train.save_every_steps == 0 and not train.save_every_minutes:
        return most, []
    existing = root
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    # An earlier export stays until the new one is complete.
    export = 2 * num_bytes(model_tensors(model)) if train.save_model else 0
    held = len(checkpoints(root))
    extra = 2 if train.keep_best else 1  # the one being written, and the best
    for keep_last in range(most, fewest - 1, -1):
        # Checkpoints that are there already are replaced in time, but never before a new one is complete.
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
