"""What each optimizer step of a run in this process cost: compilations, waits of the host for the GPU, memory held.

Steps are seen through torch's hooks for all optimizers, so the run needs no change.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from policies.compilation.layers import num_compiled
from ranks.environment import read_environment

_WAITED = "called a synchronizing CUDA operation"  # torch's warning of set_sync_debug_mode


class StepFigures(NamedTuple):
    """From the end of one optimizer update to the end of the next."""

    num_compiled: int  # frames that torch.compile compiled, again or for the first time
    num_waits: int  # of the host for the GPU; 0 on a CPU
    held_bytes: int  # at the update's end: allocated on the GPU, or the process's resident memory


class StepCounters:
    """A context around a run. `steps` has an entry for each optimizer update; fp16 steps that overflowed have none."""

    def __init__(self) -> None:
        self.steps: list[StepFigures] = []
        self._on_gpu = torch.cuda.is_available()
        self._depth = 0  # an optimizer may wrap another, whose updates are parts of its own
        self._num_compiled = self._num_waits = 0
        self._stack = ExitStack()

    def __enter__(self) -> StepCounters:
        for register, hook in (
            (register_optimizer_step_pre_hook, self._begins),
            (register_optimizer_step_post_hook, self._ends),
        ):
            self._stack.callback(register(hook).remove)
        self._num_compiled = num_compiled()
        if self._on_gpu:
            torch.cuda.set_device(read_environment().device)  # the mode below begins to use the current one
            self._stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("always", message=_WAITED)
            show = warnings.showwarning

            def count(message: Warning | str, *args: Any, **options: Any) -> None:
                if _WAITED in str(message):
                    self._num_waits += 1
                else:
                    show(message, *args, **options)

            warnings.showwarning = count
            mode = torch.cuda.get_sync_debug_mode()
            self._stack.callback(torch.cuda.set_sync_debug_mode, mode)
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        compiled, held = num_compiled(), psutil.Process().memory_info().rss
        if self._on_gpu:
            held = torch.cuda.memory_allocated()
        self.steps.append(StepFigures(compiled - self._num_compiled, self._num_waits, held))
        self._num_compiled, self._num_waits = compiled, 0
