"""How long training waits for a checkpoint, written beside it and not, and what that costs the steps meanwhile.

    python -m benchmarks.checkpoint_saving --shape llama8b --nproc 4

Runs of full fine-tuning with random weights of the shape. The first save of a run also makes room in host memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training_speed import FSDP, SHAPES, SpeedRow, make_shape, run

GB = 1e9


def summarise(events: list[dict[str, Any]]) -> list[str]:
    """One line per checkpoint: how much, how long, how long training waited; step times meanwhile and otherwise."""
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
    return [*lines, f"step without a save in flight: mean {statistics.mean(free):.3f} s of {len(free)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--every", type=int, default=60, help="steps between two saves beside training")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--flags", default="--pure_bf16", help="flags of finetuning.py to add, in one string")
    options = parser.parse_args()
    row = SpeedRow(options.shape, 2, options.length, [*FSDP, *options.flags.split(), "--keep_last", "1"], options.nproc)
    tables = []
    with tempfile.TemporaryDirectory() as temporary:
        make_shape(Path(temporary) / options.shape, options.shape)
        for beside, every in ((False, 5), (True, options.every)):
            extra = ["--async_save", str(beside), "--save_every_steps", str(every)]
            events = run(f"beside-{beside}", row, 2 * every, extra, Path(temporary), None)
            if events:
                tables.append((beside, summarise(events)))
    for beside, lines in tables:
        print(f"\nasync_save {beside}\n\n| step | GB | seconds | training waited s | steps meanwhile s |")
        print("\n".join(["|---|---|---|---|---|", *lines]))


if __name__ == "__main__":
    main()
