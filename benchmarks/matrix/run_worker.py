"""A process that runs one command line of finetuning.py after the other, for benchmarks/matrix/run_workers.py.

    python -m benchmarks.matrix.run_worker    a request per line on standard input, a reply per line on standard output

Importing torch and its companions takes longer than a run of a few steps. Each run begins as in a new process: with an
environment of its own, without compiled code of the run before, and with the same number of threads. A run that does
not finish ends this process with its exit status, as the script would, so nothing of it is left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.runs.launch import SCRIPT
from supervision.exit_status import leave
from utils.quiet import quiet_imports


def run(script: ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """Run a command line to its end; what is told of it. Ends the process if it does not finish."""
    import torch

    from benchmarks.runs.peak_watch import PeakWatch
    from benchmarks.runs.step_counters import StepCounters

    os.environ |= request["variables"]
    sys.argv = [SCRIPT, *request["flags"]]
    threads = torch.get_num_threads()
    with StepCounters() as counters, PeakWatch(Path(request["peaks"])):
        status = script.main(request["flags"])
    if status:
        leave(status)
    torch.set_num_threads(threads)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    # Left over: hooks and caches of compiled code refer to the model.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    left = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        left = torch.cuda.memory_allocated()
    return {"steps": counters.steps, "peak_bytes": peak, "left_bytes": left}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    quiet_imports()
    script = import_module("finetuning")
    for line in sys.stdin:
        request = json.loads(line)
        with open(request["output"], "ab", buffering=0) as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        reply = run(script, request)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
