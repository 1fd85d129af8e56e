"""Measures the steps of a trainer of transformers, for the benchmarks that compare finetuning.py with one."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState


class StepTimes(TrainerCallback):
    """Measures the seconds from the end of each step to the end of the next, as the GPU's own clock sees them.

    The host does not wait for the GPU, so it can prepare a step while the GPU computes the one before, as in a run that
    is not measured. The losses of the first `num_losses` steps are logged, each of which waits.
    """

    def __init__(self, num_losses: int = 0) -> None:
        self.num_losses = num_losses
        self.losses: list[float] = []
        self._marks: list[Any] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._mark()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark()
        control.should_log |= state.global_step <= self.num_losses

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step that has ended."""
        if not torch.cuda.is_available():
            return [last - first for first, last in pairwise(self._marks)]
        torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1e3 for first, last in pairwise(self._marks)]

    def _mark(self) -> None:
        if not torch.cuda.is_available():
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)
