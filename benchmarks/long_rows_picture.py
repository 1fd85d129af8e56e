"""The picture of docs/long-rows.md: peak memory and seconds against a row's length, planned and measured.

    python -m benchmarks.long_rows_picture docs/long-rows.svg     (matplotlib draws it; reads shapes only, some minutes)

Measured points are those of tests/planning/long_rows.csv.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.long_rows import read_lines
from benchmarks.runs.launch import ROOT
from benchmarks.runs.long_workloads import LONG_QLORA
from benchmarks.runs.shapes import make_shape

SHAPE = "llama8b-long"
LENGTHS = [2**power for power in range(14, 20)]  # tokens
WAYS = {"tiles": "--tile_tokens 8192", "tiles, offloaded": "--tile_tokens 8192 --activation_offloading"}


def plan(length: int, flags: str, folder: Path) -> tuple[float, float]:
    """Planned GiB and seconds of a step on one H100 80GB."""
    words = ["--model_name", str(folder / "model"), *LONG_QLORA, *flags.split(), "--context_length", str(length)]
    words += ["--batch_size_training", "1", "--dry_run", "--dry_run_hardware", "1xH100-80GB"]
    command = [sys.executable, "finetuning.py", *words, "--dry_run_json", str(folder / "plan.json")]
    subprocess.run(command, check=False, capture_output=True, cwd=ROOT)  # 3: it does not fit
    found = json.loads((folder / "plan.json").read_text())
    return found["peak_gib"], found["seconds_per_step"]


def main(path: str) -> None:
    from matplotlib import pyplot

    lines = read_lines(ROOT / "tests/planning/long_rows.csv")
    measured = [line for line in lines if line["shape"] == SHAPE and line["gpus"] == "1"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    with tempfile.TemporaryDirectory() as temporary:
        make_shape(Path(temporary) / "model", SHAPE)
        for way, flags in WAYS.items():
            plans = [plan(length, flags, Path(temporary)) for length in LENGTHS]
            points = [row for row in measured if row["flags"] == " ".join([*LONG_QLORA, *flags.split()])]
            for axis, planned, column in zip(axes, zip(*plans, strict=True), ("peak_gib", "seconds"), strict=True):
                (line,) = axis.plot(LENGTHS, planned, label=f"{way}, planned")
                lengths = [int(row["tokens"]) for row in points]
                values = [float(row[column] or math.nan) for row in points]  # one that was killed has no seconds
                axis.plot(lengths, values, "o", color=line.get_color(), label=f"{way}, measured")
    axes[0].axhline(79.1, color="gray", linestyle="dotted")
    axes[0].set(title="Peak memory, GiB (dotted: an H100 80GB)", ylim=(0, 100))
    axes[1].set(title="Seconds per step", yscale="log")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
        axis.set_xlabel("tokens of the row")
        axis.legend()
    figure.suptitle("8B, QLoRA r=16 on all linear layers, one row, --activation_checkpointing full")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
