"""How long training waits for a checkpoint, saved asynchronously or not, and how much it slows the steps meanwhile.

    python -m benchmarks.checkpoint_saving --shape llama8b --nproc 4

Trains all weights of the shape, which are random. The first save of a run also allocates host memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs.shapes import SHAPES, make_shape
from benchmarks.runs.workload import Workload
from benchmarks.training_speed import FSDP, run

GB = 1e9


def summarise(events: list[dict[str, Any]]) -> list[str]:
    """One line per checkpoint: its size, its duration, how long training waited, and the time of steps meanwhile."""
    steps = {event["step"]: event["step_seconds"] for event in events if event["event"] == "train"}
    lines, busy = [], set()
    for save in (event for event in events if event["event"] == "checkpoint"):
        left = save["seconds"] - save["blocked_seconds"]
        during = []
        for step in range(save["step"] + 1, max(steps) + 1):
            if left <= steps[step]:
                break
            left -= steps[step]
            during.append(steps[step])
            busy.add(step)
        slowed = f"{statistics.mean(during):.3f}" if during else "-"
        cells = (save["step"], f"{save['bytes'] / GB:.1f}", f"{save['seconds']:.2f}", f"{save['blocked_seconds']:.2f}")
        lines.append("| " + " | ".join(map(str, (*cells, slowed))) + " |")
    free = [seconds for step, seconds in steps.items() if step > 3 and step not in busy]
    return [*lines, f"step without a save in progress: mean {statistics.mean(free):.3f} s of {len(free)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--every", type=int, default=60, help="steps between two asynchronous saves")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--flags", default="--pure_bf16", help="flags of finetuning.py to add, in one string")
    options = parser.parse_args()
    row = Workload(options.shape, 2, options.length, [*FSDP, *options.flags.split(), "--keep_last", "1"], options.nproc)
    tables = []
    with tempfile.TemporaryDirectory() as temporary:
        make_shape(Path(temporary) / options.shape, options.shape)
        for asynchronous, every in ((False, 5), (True, options.every)):
            extra = ["--async_save", str(asynchronous), "--save_every_steps", str(every)]
            events = run(f"async-{asynchronous}", row, 2 * every, extra, Path(temporary), None)
            if events:
                tables.append((asynchronous, summarise(events)))
    for asynchronous, lines in tables:
        print(f"\nasync_save {asynchronous}\n\n| step | GB | seconds | s that training waited | s per step meanwhile |")
        print("\n".join(["|---|---|---|---|---|", *lines]))


if __name__ == "__main__":
    main()
