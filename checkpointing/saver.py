"""A run's checkpoints, written while the loop waits as little as possible."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.final_copy import save_copy
from checkpointing.finding import Checkpoint
from checkpointing.gathering import gather_to_host
from checkpointing.host_copy import HostCopy
from checkpointing.marks import FORMAT
from checkpointing.save_plan import SavePlan
from checkpointing.train_state import TrainState
from checkpointing.trained import Trained, model_tensors
from checkpointing.writing import CheckpointError, Contents, write_checkpoint
from ranks.collectives import on_rank_zero
from ranks.process_group import new_host_group
from run_folder.checkpoint_folder import BEST, STATE, STREAM, give_up_after, point_to, remove_leftovers, step_folder
from utils.disk_errors import refused_by_disk
from utils.progress import phase_begins
from utils.seeding import rng_state
from utils.units import readable


@dataclass
class _Save:
    """A save in flight."""

    step: int
    is_last: bool  # the run ends with it
    blocked_seconds: float
    future: Future[tuple[int, float]]  # bytes, seconds


class CheckpointSaver:
    """Writes the run's checkpoints. Every rank must call its methods alike, `due_by_time` aside.

    If a save fails, a line says so and the run goes on; the next save tries again, and the run's end tells if the last
    one failed. One save at a time is in flight.

    Args:
        trained: the objects whose state a checkpoint keeps.
        root: the folder of the checkpoints.
        metadata: entries of state.json besides the state: facts that a resumed run must have in common with this one.
        files: small ones that every checkpoint carries, by their paths in it.
        stream_state: returns the run's place in its stream, on rank 0; None without one.
        say: prints a line on rank 0.
        write_event: writes a line of metrics.jsonl there.
    """

    def __init__(
        self,
        trained: Trained,
        plan: SavePlan,
        root: Path,
        *,
        metadata: Mapping[str, Any],
        files: Mapping[str, bytes],
        stream_state: Callable[[], bytes | None],
        say: Callable[[str], None],
        write_event: Callable[..., None],
    ) -> None:
        self.trained, self.plan, self.root = trained, plan, root
        self.metadata, self.files, self.stream_state = metadata, files, stream_state
        self.say, self.write_event = say, write_event
        # The thread's collectives would mix with those of the training loop in one group.
        self.group = new_host_group()
        self.beside_training = plan.beside_training
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._host_copy = HostCopy()
        self._room: Future[None] | None = None  # memory for that copy, being pinned
        self._in_flight: _Save | None = None
        self._last_began = time.monotonic()
        self.tried_step = self.saved_step = -1

    def begin(self, resumed: Checkpoint | None) -> None:
        """Call before the first step. The resumed checkpoint counts as saved; leftovers are deleted.

        Raises:
            ConfigError: on every rank, if the disk refuses that.
        """

        @refused_by_disk("--output_dir", self.root)
        def clear() -> None:
            remove_leftovers(self.root)
            if resumed is not None:
                give_up_after(self.root, resumed.step)

        if resumed is not None and on_rank_zero(lambda: resumed.folder.parent.resolve() == self.root.resolve()):
            self.tried_step = self.saved_step = resumed.step
        on_rank_zero(clear)

    def due(self, step: int, *, ends_epoch: bool, ends_run: bool) -> bool:
        """Whether a checkpoint is due by steps (see `SavePlan.due`)."""
        return self.plan.due(step, ends_epoch=ends_epoch, ends_run=ends_run)

    def due_by_time(self) -> bool:
        """Whether a checkpoint is due by rank 0's clock. Only rank 0 knows, and has to tell the others."""
        minutes = self.plan.every_minutes
        return dist.get_rank() == 0 and minutes > 0 and time.monotonic() - self._last_began > 60 * minutes

    def save(self, state: TrainState, *, best: bool = False, is_last: bool = False) -> None:
        """Write a checkpoint of the run as it is now, unless that is done. Returns as soon as training may go on.

        Args:
            is_last: whether the run ends with it, so that no later save can make up for a failure.
        """
        began = time.monotonic()
        self.wait()
        if self.saved_step == state.step:
            if best:
                self._keep_as_best(state.step)
            return
        self._last_began, self.tried_step = time.monotonic(), state.step
        phase_begins(f"saving a checkpoint of step {state.step}")
        tensors = self.trained.tensors()
        if self.plan.full:
            tensors = gather_to_host(tensors)
        elif self.beside_training:
            tensors = self._copied(tensors)
        files = {STATE: self._state_json(state), **self.files}
        if (stream_state := self.stream_state()) is not None:
            files[STREAM] = stream_state
        contents = Contents(state.step, tensors, full=self.plan.full, rng=rng_state(), files=files)
        folder, keep_last = step_folder(self.root, state.step), self.plan.keep_last
        write = partial(write_checkpoint, folder, contents, group=self.group, keep_last=keep_last, best=best)
        future: Future[tuple[int, float]] = self._thread.submit(_timed, write)
        if not self.beside_training:
            future.exception()  # wait for the end, whichever it is
        self._in_flight = _Save(state.step, is_last, time.monotonic() - began, future)
        if not self.beside_training:
            self.wait()

    def after_step(self) -> None:
        """Report a save that has ended. Only rank 0 prints it, so ranks do not agree on the step.

        After the first step the optimizer has its states, so host memory for a copy is prepared in the thread.
        """
        if self.beside_training and self.plan.saves and not self.plan.full and self._room is None:
            self._room = self._thread.submit(self._host_copy.prepare, self.trained.tensors())
        if self._in_flight is not None and self._in_flight.future.done():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save in flight. Returns whether the last one tried is complete, the same on every rank."""
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
                # docs/decisions.md, "Saving never ends the training, and decides the status".
                goes_on = "" if save.is_last else "; the run goes on, and the next one tries again"
                self.say(f"checkpoint of step {save.step} failed: {error}{goes_on}")
        return self.saved_step == self.tried_step

    def save_copy(self, state: TrainState) -> bool:
        """Write the final state into the checkpoints' folder itself, as --dist_checkpoint_root_folder asks.

        Returns:
            Whether it is there, the same on every rank.
        """
        self.wait()
        phase_begins("saving a copy of the final weights")
        has_optimizer = self.plan.copies_optimizer
        tensors = model_tensors(self.trained.model, every_name=True)
        tensors |= self.trained.tensors() if has_optimizer else {}
        files = {STATE: self._state_json(state, has_optimizer=has_optimizer), **self.files}
        try:
            tensors = gather_to_host(tensors) if self.plan.full else tensors
            save_copy(self.root, Contents(state.step, tensors, full=self.plan.full, rng=None, files=files))
        except CheckpointError as error:
            self.say(f"copy of the final weights: {self.root} cannot be written: {error}")
            return False
        self.say(f"copy of the final weights: {self.root}")
        return True

    def close(self) -> None:
        """Call after the last save."""
        self.wait()
        self._thread.shutdown()
        self._host_copy.close()

    def _keep_as_best(self, step: int) -> None:
        """Mark the checkpoint that we resumed from as the best, without writing it again: a crash meanwhile could
        leave none. Its state says that the evaluation is due; a run resumed from it evaluates once more."""
        try:
            on_rank_zero(lambda: point_to(step_folder(self.root, step), BEST))
        except (OSError, RuntimeError) as error:
            self.say(f"checkpoint of step {step} is the best, but may be deleted like any other: {error}")

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy in host memory. Without room for one: the tensors themselves, and training waits from now on."""
        try:
            if self._room is not None:
                self._room.result()
            return self._host_copy.take(tensors)
        except (MemoryError, OSError, RuntimeError) as error:
            self.beside_training = False
            self._host_copy.close()
            self.say(f"async_save: False from now on: {' '.join(str(error).split())[:200]}")
            return tensors

    def _state_json(self, state: TrainState, *, has_optimizer: bool = True) -> bytes:
        values = {
            "format": FORMAT,
            "state": state.to_dict(),
            **self.trained.values(),
            "has_optimizer": has_optimizer,
            "world_size": dist.get_world_size(),
            **self.metadata,
        }
        return json.dumps(values, indent=1).encode()


def _timed(write: Callable[[], int]) -> tuple[int, float]:
    started = time.monotonic()
    return write(), time.monotonic() - started
