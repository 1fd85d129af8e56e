"""finetuning.py with a clock on the parts of its start, which are written to a file; it ends after the third step.

    python -m benchmarks.runs.start_parts STARTED FILE [flags of finetuning.py]

STARTED is `time.monotonic()` of the process that started this one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from supervision.exit_status import leave
from supervision.process_start import begin_process

PROBE = "probing, whether torch.compile works"
FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "reading": {"preparation.prepare": ("find_resume_state", "read_inputs", "find_checkpoint")},
    "planning": {
        "preparation.prepare": ("follow_plan",),
        "preparation.start": ("follow_plan",),
        "preparation.compile_trial": ("follow_plan",),
    },
    "building": {"preparation.prepare": ("build_model", "build")},
    PROBE: {"preparation.start": ("why_ranks_cannot_compile",)},
    "probing, all else": {
        "preparation.prepare": ("check_losses", "try_to_compile"),
        "resolving.resolved": ("find_flash_attention_4",),
    },
}
"""The parts, and their functions by the modules that call them."""

NUM_STEPS = 3


class PartsOfStart:
    """A clock that adds to one part at a time. What is compiled meanwhile is a part of its own, but for the probe's."""

    def __init__(self, started: float, compiled_seconds: Callable[[], float]) -> None:
        names = ("imports", *FUNCTIONS, "compiling", "first step", "later steps", "other")
        self.seconds = dict.fromkeys(names, 0.0)
        self._compiled_seconds = compiled_seconds
        self._now, self._compiled = started, 0.0
        self._current = "imports"

    def enter(self, part: str) -> str:
        """Add from now on to this part. Returns the one before."""
        now, compiled, before = time.monotonic(), self._compiled_seconds(), self._current
        compiling = 0.0 if before == PROBE else compiled - self._compiled
        self.seconds[before] += now - self._now - compiling
        self.seconds["compiling"] += compiling
        self._now, self._compiled, self._current = now, compiled, part
        return before

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls belong to the part."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return call

    def watch(self) -> None:
        """Time the functions of all parts."""
        for part, places in FUNCTIONS.items():
            for place, names in places.items():
                module = vars(import_module(place))
                module.update({name: self.timed(part, module[name]) for name in names})

    def table(self, started: float, ends: list[float]) -> dict[str, float]:
        """Seconds by part. Up to "a later step" they add up to those to the end of step 1.

        Args:
            ends: of the steps, by `time.monotonic()`.
        """
        seconds, later = dict(self.seconds), ends[-1] - ends[-2]
        del seconds["later steps"]
        seconds["first kernels"] = seconds.pop("first step") - later  # what it took longer than a later one
        totals = {f"to the end of step {step}": ends[step - 1] - started for step in (1, NUM_STEPS)}
        return {**seconds, "a later step": later, **totals}


def compiled_seconds() -> float:
    """Seconds in which torch compiled so far, forward and backward."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = {} if dynamo is None else dynamo.compilation_time_metrics
    return sum(sum(spent.get(name, ())) for name in ("_compile.compile_inner", "backward._backward_impl"))


def main() -> None:
    started, file, argv = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    sys.argv = ["finetuning.py", *argv]
    imports_ended = begin_process(argv)
    finetuning = import_module("finetuning")
    imports_ended()
    parts, ends = PartsOfStart(started, compiled_seconds), list[float]()
    parts.enter("other")
    parts.watch()
    finish_step = finetuning.finish_step

    def finish_step_timed(*args: Any, **kwargs: Any) -> None:
        finish_step(*args, **kwargs)
        parts.enter("later steps")
        ends.append(time.monotonic())
        if len(ends) == NUM_STEPS:
            file.write_text(json.dumps(parts.table(started, ends)))
            os._exit(0)  # in the middle of a run, which has decided as a long one does

    vars(finetuning).update(train=parts.timed("first step", finetuning.train), finish_step=finish_step_timed)
    if status := finetuning.main(argv, ends_process=True):
        leave(status)


if __name__ == "__main__":
    main()
