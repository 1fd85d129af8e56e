"""From the command to the first optimizer step: seconds, first with empty compiler caches, then with filled ones.

    python -m benchmarks.start_up --shape tinyllama -- --pure_bf16 --compile

Random rows and weights of a named shape. Also prints when each line of the run appeared. The files of torch and
transformers are read before the first run, so that a disk's cache is warm in both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.runs.launch import ROOT, SCRIPT
from benchmarks.runs.measurements import train_events
from benchmarks.runs.shapes import SHAPES, make_shape

POLL_SECONDS = 0.05


def first_step_seconds(command: list[str], output: Path, environment: dict[str, str]) -> float:
    """Run the command; seconds from its start to the event of its first step.

    Raises:
        SystemExit: if there was none.
    """
    started = time.monotonic()
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert run.stdout is not None
    lines = run.stdout

    def show() -> None:
        for line in lines:
            if line.strip():
                print(f"  {time.monotonic() - started:6.1f} s  {line.rstrip()[:160]}", flush=True)

    reader = threading.Thread(target=show)
    reader.start()
    seconds = 0.0
    while not seconds and run.poll() is None:
        time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - started if train_events(output) else 0.0
    reader.join()
    if run.wait() or not seconds:
        raise SystemExit(f"error: the run ended with status {run.returncode}; its lines are above")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("flags", nargs="*", help="of finetuning.py, after --")
    options = parser.parse_args()
    subprocess.run([sys.executable, SCRIPT, "--help"], stdout=subprocess.DEVNULL, check=True)
    subprocess.run([sys.executable, "-c", "import torch, transformers, peft"], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / options.shape
        make_shape(model, options.shape)
        environment = os.environ | {"ROW_LENGTH": str(options.length), "NUM_ROWS": str(2 * options.batch)}
        environment |= {f"{name}_CACHE_DIR": f"{temporary}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
        for caches in ("empty", "filled"):
            output = Path(temporary) / f"run-{caches}"
            command = [sys.executable, SCRIPT, "--model_name", str(model), "--random_weights", "--output_dir"]
            command += [str(output), "--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:get_rows"]
            command += ["--run_validation", "False", "--context_length", str(options.length), "--max_train_step", "2"]
            command += ["--batch_size_training", str(options.batch), "--save_model", "False"]
            command += ["--save_every_steps", "0", *options.flags]
            seconds = first_step_seconds(command, output, environment)
            print(f"first step after {seconds:.1f} s, compiler caches {caches}", flush=True)


if __name__ == "__main__":
    main()
