"""From the command to the end of the third optimizer step: seconds by part, and the state of the caches before.

    python -m benchmarks.start_up                                  TinyLlama-1.1B's shape on a GPU, default flags
    python -m benchmarks.start_up --shape llama8b --batch 2 --length 4096 -- --pure_bf16 --use_peft
    python -m benchmarks.start_up --shape tiny --length 512 --batch 2                                   on a CPU

Random rows and weights of a named shape. The first start finds nothing compiled, and the files that it reads dropped
from the system's cache (other processes that use them keep them there); the second finds files and compiled code. With
--starts 3 a third finds files, and nothing compiled.
The run is one of --steps steps, and is ended after the third: whether it compiles depends on its length.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from utils.bytecode import compiles_at_each_start, keep_bytecode

ROOT = Path(__file__).resolve().parents[1]
CACHES = ("TORCHINDUCTOR", "TRITON", "FLASH_ATTENTION_CUTE_DSL")  # as in utils/compiled_code.py
STARTS = {
    "cold files, nothing compiled": "compiled-1",
    "warm files, compiled code kept": "compiled-1",
    "warm files, nothing compiled": "compiled-2",
}
"""The kinds of start, in their order, and the folder in which each finds compiled code."""

STEPS_PER_EPOCH = 4  # one more than are looked at
BETWEEN_SAMPLES = 1 << 18  # bytes
PREPARE = """
import json, sys, finetuning
from pathlib import Path
specs = [spec for module in list(sys.modules.values()) if (spec := vars(module).get("__spec__"))]
files = {str(spec.cached or spec.origin) for spec in specs}
files |= {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
from benchmarks.runs.shapes import make_shape
make_shape(Path(sys.argv[1]), sys.argv[2])
print(json.dumps(sorted(file for file in files if file.startswith("/"))))
"""
"""In a process of its own: this one must keep none of these files in memory, or they could not be dropped."""


def prepare(model: Path, shape: str) -> list[Path]:
    """Make a model folder. Returns the bytecode and libraries that `import finetuning` reads.

    Raises:
        SystemExit: if there is no such shape.
    """
    command = [sys.executable, "-c", PREPARE, str(model), shape]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nerror: --shape {shape}: no model folder was made")
    return [path for path in map(Path, json.loads(done.stdout.splitlines()[-1])) if path.is_file()]


def forget(files: Sequence[Path]) -> None:
    """Drop these files from the system's cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def share_cached(files: Sequence[Path]) -> float | None:
    """The share of these files, by samples, that the system has in its cache; None if it cannot be asked."""
    found: list[bool] = []
    for path in files:
        with path.open("rb", buffering=0) as file:
            for place in range(0, max(1, path.stat().st_size), BETWEEN_SAMPLES):
                try:
                    os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
                except BlockingIOError:
                    found.append(False)
                except OSError:
                    return None  # not of this file system
                else:
                    found.append(True)
    return sum(found) / max(1, len(found))


def mebibytes_in(folder: Path) -> float:
    """The size of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


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
    compute = [line.strip() for line in run.stdout.splitlines() if line.startswith("compute ")]
    print(f"{parts['to the end of step 3']:.1f} s; {' '.join(compute)}", flush=True)
    return parts


def table(columns: Sequence[dict[str, float]], states: Mapping[str, Sequence[str]]) -> str:
    """In Markdown: the state of the caches before each start, then its parts.

    Args:
        states: by their names, a word for each start.
    """
    rows = [[name, *words] for name, words in states.items()]
    rows += [[name, *(f"{column[name]:.2f}" for column in columns)] for name in columns[0]]
    heading = f"| | {' | '.join(list(STARTS)[: len(columns)])} |\n|---|" + "---:|" * len(columns)
    return "\n".join([heading, *(f"| {' | '.join(row)} |" for row in rows)])


def flags_of(model: Path, options: argparse.Namespace) -> list[str]:
    """Those of a run with default settings, which neither evaluates nor saves."""
    flags = ["--model_name", str(model), "--random_weights", "--run_validation", "False", "--save_model", "False"]
    flags += ["--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:get_rows", "--save_every_steps", "0"]
    flags += ["--context_length", str(options.length), "--batch_size_training", str(options.batch)]
    flags += ["--max_train_step", str(options.steps), "--num_epochs", str(math.ceil(options.steps / STEPS_PER_EPOCH))]
    return [*flags, *options.flags]


def measure(flags: list[str], files: Sequence[Path], folder: Path, num_starts: int) -> str:
    """As many starts; a table of them."""
    columns, states = [], dict[str, list[str]]({"files cached before": [], "compiled code before, MiB": []})
    for number, (name, place) in enumerate(list(STARTS.items())[:num_starts]):
        if number == 0:
            forget(files)
        share = share_cached(files)
        states["files cached before"].append("unknown" if share is None else f"{100 * share:.0f} %")
        states["compiled code before, MiB"].append(f"{mebibytes_in(folder / place):.1f}")
        print(f"{name}: ", end="", flush=True)
        caches = {f"{library}_CACHE_DIR": str(folder / place / library) for library in CACHES}
        output = ["--output_dir", str(folder / f"run-{number}")]
        columns.append(start([*flags, *output], folder / f"parts-{number}.json", os.environ | caches))
    return table(columns, states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tinyllama", help="one of benchmarks/runs/shapes.py")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000, help="of the run, at least 3")
    parser.add_argument("--starts", type=int, choices=range(1, len(STARTS) + 1), default=2)
    parser.add_argument("flags", nargs="*", help="of finetuning.py, after --")
    options = parser.parse_args()
    keep_bytecode()  # for all processes that this one starts
    uncompiled = [name for name in ("torch", "transformers") if compiles_at_each_start(name)]
    kept = f"kept in {sys.pycache_prefix}" if sys.pycache_prefix else "kept"
    bytecode = f"not that of {', '.join(uncompiled)}" if uncompiled else kept
    print(f"torch {version('torch')}, transformers {version('transformers')}, Python's bytecode: {bytecode}")
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = Path(temporary), options.batch * min(options.steps, STEPS_PER_EPOCH)
        os.environ.update(ROW_LENGTH=str(options.length), NUM_ROWS=str(rows))
        files = prepare(folder / options.shape, options.shape)
        size = sum(path.stat().st_size for path in files) / 2**20
        print(f"imports read {len(files):,} files of {size:,.0f} MiB")
        print(measure(flags_of(folder / options.shape, options), files, folder, options.starts))


if __name__ == "__main__":
    main()
