"""From the command to the end of the first optimizer step: seconds by part, with empty and filled caches.

    python -m benchmarks.start_up                                      TinyLlama-1.1B's shape on a GPU, default flags
    python -m benchmarks.start_up --shape tiny --length 512 --batch 2 -- --use_peft               on a CPU

Random rows and weights of a named shape. Four starts: the system's cache of files without those of Python's packages
(other processes that use them keep them there) and compiler caches empty; then files cached; then compiler caches
filled, twice. Parts are the functions that `preparation.prepare.prepare` calls; those below 0.05 s are "other".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.runs.launch import ROOT
from benchmarks.runs.shapes import SHAPES, make_shape
from benchmarks.runs.start_parts import LEAST_SECONDS

STARTS = (
    "files not cached, compiler caches empty",
    "files cached, compiler caches empty",
    "files cached, compiler caches filled",
    "the same again",
)


def forget_files() -> int:
    """Drop the files of Python's packages from the system's cache; how many were asked for."""
    packages = Path(torch.__file__).parents[1]
    files = [path for path in packages.rglob("*") if path.suffix in (".py", ".pyc", ".so") or ".so." in path.name]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return len(files)


def start(flags: list[str], file: Path, environment: dict[str, str]) -> dict[str, float]:
    """Run the command; seconds by part.

    Raises:
        SystemExit: if it failed; with what it printed.
    """
    begun = [sys.executable, "-m", "benchmarks.runs.start_parts", repr(time.monotonic()), str(file), *flags]
    run = subprocess.run(begun, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    if run.returncode or not file.exists():
        raise SystemExit(f"{run.stdout}{run.stderr}\nerror: the run ended with status {run.returncode}")
    parts: dict[str, float] = json.loads(file.read_text())
    return parts


def table(columns: list[dict[str, float]]) -> str:
    """In Markdown: a row for each part that took 0.05 s in one of the starts."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    shown = [name for name in names if name == "other" or max(c.get(name, 0.0) for c in columns) >= LEAST_SECONDS]
    for column in columns:
        column["other"] += sum(seconds for name, seconds in column.items() if name not in shown)
    rows = [f"| {name} | " + " | ".join(f"{c.get(name, 0.0):.2f}" for c in columns) + " |" for name in shown]
    heading = "| seconds | " + " | ".join(STARTS) + " |\n|---|" + "---:|" * len(STARTS)
    return "\n".join([heading, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("flags", nargs="*", help="of finetuning.py, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / options.shape
        make_shape(model, options.shape)
        environment = os.environ | {"ROW_LENGTH": str(options.length), "NUM_ROWS": str(2 * options.batch)}
        environment |= {f"{name}_CACHE_DIR": f"{temporary}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
        flags = ["--model_name", str(model), "--random_weights", "--run_validation", "False", "--save_model", "False"]
        flags += ["--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:get_rows", "--save_every_steps", "0"]
        flags += ["--context_length", str(options.length), "--batch_size_training", str(options.batch)]
        flags += ["--max_train_step", "2", *options.flags]
        columns = []
        for number, caches in enumerate(STARTS):
            if number == 0:
                print(f"{forget_files():,} files are to leave the system's cache", flush=True)
            if number == 1:  # caches of the first start go
                environment |= {f"{name}_CACHE_DIR": f"{temporary}/{name}-2" for name in ("TORCHINDUCTOR", "TRITON")}
            output = Path(temporary) / f"run-{number}"
            parts = start([*flags, "--output_dir", str(output)], Path(temporary) / f"parts-{number}.json", environment)
            print(f"{parts['to the end of the first step']:.1f} s, {caches}", flush=True)
            columns.append(parts)
    print(table(columns))


if __name__ == "__main__":
    main()
