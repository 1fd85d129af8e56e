"""Whether a long run grows: memory, open files, threads and files in temporary places, early and late in one run.

    python -m benchmarks.growth [--steps 10000] [--early 500] [--folder F] [flags of finetuning.py]

Trains a tiny model on two loader workers, with an evaluation and a checkpoint every 50 steps. Looks again and again at
the run and its children for some evaluations and saves after `early` steps and after `steps`, and prints the least of
each that it saw: what an evaluation or a save holds for a moment is no growth. The exit status is 1 if anything has
grown; of resident memory 2 % are allowed, for what the allocator keeps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.runs.launch import SCRIPT
from benchmarks.runs.measurements import MIB, train_events
from tools.make_tiny_model import make_tiny_model

EVERY = 50  # steps from save to save
LOOKS = 60
AFTER = 4000  # steps that the run goes on for while the last looks are taken
TOLERANCE = 0.02
SAMPLES = Path(__file__).parent.parent / "datasets/samples/dialogue_summary"


def look(run: psutil.Process, temporary: Path, shared_before: set[str]) -> dict[str, float]:
    """What the run and its children hold now."""
    members = [run, *run.children(recursive=True)]
    return {
        "resident memory (MiB)": sum(member.memory_info().rss for member in members) / MIB,
        "processes": len(members),
        "threads": sum(member.num_threads() for member in members),
        "open files": sum(member.num_fds() for member in members),
        "files in /dev/shm": len(set(os.listdir("/dev/shm")) - shared_before),
        "temporary files": sum(len(files) for _, _, files in os.walk(temporary)),
    }


def look_at_step(run: psutil.Process, folder: Path, step: int, temporary: Path, shared: set[str]) -> dict[str, float]:
    """The least that several looks see, from `step` on.

    Raises:
        psutil.NoSuchProcess: if the run ends before.
    """
    while not (events := train_events(folder)) or events[-1]["step"] < step:
        if not run.is_running() or run.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(run.pid)
        time.sleep(0.2)
    looks: list[dict[str, float]] = []
    while len(looks) < LOOKS:
        looks.append(look(run, temporary, shared))
        time.sleep(0.05)
    return {name: min(figures[name] for figures in looks) for name in looks[0]}


def measure(options: argparse.Namespace, given: Sequence[str], folder: Path) -> tuple[dict[str, float], ...]:
    """The figures early and late in one run.

    Raises:
        psutil.NoSuchProcess: if the run fails; its output is in `folder`.
    """
    model = make_tiny_model(folder / "tiny", vocab_size=600, hidden_size=32, intermediate_size=64, num_layers=1)
    run, temporary = folder / "run", folder / "tmp"
    temporary.mkdir()
    flags = ["--model_name", str(model), "--samsum_dataset.data_path", str(SAMPLES), "--num_workers_dataloader", "2"]
    flags += ["--batch_size_training", "1", "--context_length", "128", "--num_epochs", str(options.steps + AFTER)]
    flags += ["--max_train_step", str(options.steps + AFTER), "--max_eval_step", "2", "--val_batch_size", "1"]
    flags += ["--save_every_steps", str(EVERY), "--eval_every_steps", str(EVERY), "--lr", "1e-4", *given]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(temporary)}
    shared = set(os.listdir("/dev/shm"))
    with open(folder / "log", "w") as log:
        command = [sys.executable, SCRIPT, *flags, "--output_dir", str(run)]
        started = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    process = psutil.Process(started.pid)
    try:
        return tuple(look_at_step(process, run, step, temporary, shared) for step in (options.early, options.steps))
    finally:
        started.kill()
        started.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--early", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="for model and run; unset: a temporary one")
    options, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            early, late = measure(options, given, folder)
        except psutil.NoSuchProcess:
            print((folder / "log").read_text()[-2000:], "error: the run ended before it could be looked at", sep="\n")
            return 1
    grown = [name for name in early if late[name] > early[name] * (1 + TOLERANCE * name.startswith("resident"))]
    print(f"{'':24}{f'step {options.early}':>14}{f'step {options.steps}':>14}")
    for name in early:
        print(f"{name:24}{early[name]:14,.1f}{late[name]:14,.1f}{'  grows' if name in grown else ''}")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
