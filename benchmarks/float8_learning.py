"""Losses of --float8 next to those of bf16, on the sample dialogues: all weights, and LoRA on a frozen model.

    python -m benchmarks.float8_learning
    python -m benchmarks.float8_learning --shape tinyllama --batch_size 8 --length 512 --lr 2e-4

All weights are trained from random ones, LoRA on what bf16 made of them. All rows of one method see the same tokens at
each step. `loss` is the mean of the last ten steps. On a CPU float8 is emulated: the figures are those of the rounding,
not of a GPU's kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.runs.launch import ROOT, UNCOMPILED, launch
from benchmarks.runs.measurements import train_events
from benchmarks.runs.shapes import SHAPES, make_shape

RECIPES = {"bf16": [], "tensorwise": ["--float8", "tensorwise"], "rowwise": ["--float8", "rowwise"]}
LAST = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny-words")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", default="2e-3")
    options = parser.parse_args()
    flags = ["--samsum_dataset.data_path", f"{ROOT}/datasets/samples/dialogue_summary"]
    flags += ["--context_length", str(options.length), "--batch_size_training", str(options.batch_size)]
    flags += ["--max_train_step", str(options.steps), "--num_epochs", "1000", "--run_validation", "False"]
    flags += ["--save_every_steps", "0", "--save_every_minutes", "0", "--show_sample", "False"]
    flags += ["--mixed_precision", "True", "--lr", options.lr, "--warmup_steps", "10", "--gradient_clipping"]
    flags += ["--activation_checkpointing", "off", *UNCOMPILED]
    print("| | bf16 | tensorwise | vs bf16 | rowwise | vs bf16 |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_shape(folder / "shape", options.shape)
        methods = {
            "all weights": ["--model_name", str(folder / "shape"), "--random_weights"],
            "LoRA": ["--model_name", str(folder / "all weights-bf16" / "model"), "--use_peft"],
        }
        for method, of_method in methods.items():
            losses = {}
            for recipe, of_recipe in RECIPES.items():
                output = folder / f"{method}-{recipe}"
                failure = launch([*flags, *of_method, *of_recipe, "--output_dir", str(output)], 1)
                if failure:
                    sys.exit(f"{method}, {recipe} failed\n{failure}")
                found = [event["loss"] for event in train_events(output)]
                losses[recipe] = statistics.mean(found[-LAST:])
                print(f"{method}, {recipe}: {found[0]:.4f} -> {losses[recipe]:.4f}", file=sys.stderr, flush=True)
            cells = [f"{losses[name]:.4f} | {100 * (losses[name] / losses['bf16'] - 1):+.2f} %" for name in RECIPES]
            print(f"| {method} | {losses['bf16']:.4f} | {' | '.join(cells[1:])} |", flush=True)


if __name__ == "__main__":
    main()
