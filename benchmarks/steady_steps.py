"""Does a run reach a steady state: no recompilation, no host wait but the one, no growth of memory, step after step?

    python -m benchmarks.steady_steps [--steps 50] -- --model_name M --pure_bf16 --compile ...
    torchrun --nproc_per_node 2 -m benchmarks.steady_steps -- --enable_fsdp --model_name M ...

Trains --steps optimizer steps after a warm-up and prints a line for each rank. The exit status is 1 if any of the three
does not hold. Waits of the host are those that torch's sync debug mode sees, so they are counted on GPUs only. Memory
is what the allocator has handed out when an update ends, or the resident memory of the process on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from supervision.exit_status import leave
from utils.launcher_rank import launcher_rank
from utils.printing import print_line
from utils.quiet import quiet_imports
from utils.streams import keep_standard_streams
from utils.wording import plural

WAITS_PER_STEP = 1  # for loss and gradient norm, before the update
GROWTH_BYTES = 2**24  # what caches of Python and of libraries may add


def problems(steps: Sequence[Sequence[int]]) -> list[str]:
    """What is not steady in these steps: (compiled, waits, held bytes) of each, as step_counters.StepFigures."""
    found = []
    if recompiled := sum(compiled for compiled, _, _ in steps):
        found.append(f"{recompiled} recompilations")
    if waiting := [waits for _, waits, _ in steps if waits > WAITS_PER_STEP]:
        found.append(f"{len(waiting)} steps with up to {max(waiting)} waits of the host")
    if (half := len(steps) // 2) == 0:
        return found
    # Batches differ, so the highest of each half is compared.
    before, after = (max(held for _, _, held in part) for part in (steps[:half], steps[half:]))
    if after - before > GROWTH_BYTES:
        found.append(f"memory grew by {(after - before) / 2**20:.0f} MiB, to {after / 2**30:.2f} GiB")
    return found


def main(argv: Sequence[str]) -> int:
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    options = parser.parse_args(own)
    if not flags or "--max_train_step" in flags or options.steps < 2:
        parser.error("give the flags of a run after --, without --max_train_step; and at least 2 steps")
    finetuning = import_module("finetuning")
    from benchmarks.runs.step_counters import StepCounters

    with StepCounters() as counters:
        status = finetuning.main([*flags, "--max_train_step", str(options.warmup + options.steps)])
    if status:
        return status
    steps = counters.steps[options.warmup :]
    found = problems(steps)
    if len(steps) < options.steps:  # an epoch was shorter, or fp16 made no update
        found.append(f"only {len(steps)} updates; give more data, or --num_epochs")
    waits = max((waits for _, waits, _ in steps), default=0)
    held = steps[-1].held_bytes / 2**30 if steps else 0.0
    figures = f"{len(steps)} steps, {plural(waits, 'wait')} of the host in a step, {held:.2f} GiB held at the end"
    print_line(f"rank {launcher_rank()}: {'; '.join(found) or 'steady'} | {figures}")
    return int(bool(found))


if __name__ == "__main__":
    keep_standard_streams()
    quiet_imports()
    if status := main(sys.argv[1:]):
        leave(status)
