"""finetuning.py with a clock on the parts of its start, which are written to a file.

    python -m benchmarks.runs.start_parts STARTED FILE [flags of finetuning.py]

STARTED is `time.monotonic()` of the process that started this one. The parts are the functions that prepare() calls,
by their names, so the table follows the code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from supervision.exit_status import leave
from supervision.process_start import begin_process

LEAST_SECONDS = 0.05


class PartsOfStart:
    """Seconds by the names of parts, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; each call adds to the part."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seconds.setdefault(part, 0.0)
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.monotonic() - started

        return call

    def watch_functions(self, module: Any) -> None:
        """Time the functions that a module has imported from others, as it calls them."""
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ != module.__name__:
                setattr(module, name, self.timed(f"{name}()", value))


def compiled_seconds() -> dict[str, float]:
    """Seconds in which torch compiled, forward and backward, and of these the wait for kernels' code."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent = {} if dynamo is None else {name: sum(times) for name, times in dynamo.compilation_time_metrics.items()}
    compiling = sum(spent.get(name, 0.0) for name in ("_compile.compile_inner", "backward._backward_impl"))
    return {"of these: compiling": compiling, "of these: waiting for kernels": spent.get("async_compile.wait", 0.0)}


def main() -> None:
    started, file, argv = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    sys.argv = ["finetuning.py", *argv]
    parts = PartsOfStart()
    imports_ended = begin_process(argv)
    finetuning, prepare = import_module("finetuning"), import_module("preparation.prepare")
    imports_ended()
    parts.seconds["imports"] = time.monotonic() - started
    parts.watch_functions(prepare)
    train, finish_step, steps = finetuning.train, finetuning.finish_step, list[float]()

    def train_timed(*args: Any, **kwargs: Any) -> str:
        in_parts = sum(parts.seconds.values())
        parts.seconds["other"] = time.monotonic() - started - in_parts
        steps.append(time.monotonic())
        return train(*args, **kwargs)

    def finish_step_timed(*args: Any, **kwargs: Any) -> None:
        finish_step(*args, **kwargs)
        steps.append(time.monotonic())
        if len(steps) == 2:
            parts.seconds |= {"first step": steps[1] - steps[0], **compiled_seconds()}
            parts.seconds["to the end of the first step"] = steps[1] - started
        if len(steps) == 3:
            parts.seconds["a later step"] = steps[2] - steps[1]
            file.write_text(json.dumps(parts.seconds))

    vars(finetuning).update(train=train_timed, finish_step=finish_step_timed)
    if status := finetuning.main(argv, ends_process=True):
        leave(status)


if __name__ == "__main__":
    main()
