"""Losses compared with fp32's, and peak memory, of every precision, adapter (none, LoRA, QLoRA) and layout.

    python -m benchmarks.precision --shape tinyllama --nproc 4

A model of the shape is first trained from random weights on the sample dialogues, so that the comparison is not about
noise. Then every combination fine-tunes it for 50 steps on the same rows. Only losses and memory are measured, so
several runs share the GPUs. With fewer GPUs than --nproc, several processes of one run do too
(benchmarks/runs/launch.py).
`loss` is the mean of the last five steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs.launch import ROOT, UNCOMPILED, launch
from benchmarks.runs.measurements import read_events, train_events
from benchmarks.runs.shapes import SHAPES, make_shape

PRECISIONS = {
    "fp32": ["--mixed_precision", "False"],
    "bf16-mixed": ["--mixed_precision", "True"],
    "bf16-true": ["--pure_bf16"],
    "fp16-mixed": ["--use_fp16"],
    "bf16-true, Kahan": ["--pure_bf16", "--optimizer", "anyprecision", "--use_kahan_summation"],
}
METHODS = {
    "full": ["--lr", "1e-4"],
    "LoRA": ["--lr", "2e-4", "--use_peft", "--lora_config.lora_dropout", "0"],
    "QLoRA": ["--lr", "2e-4", "--use_peft", "--lora_config.lora_dropout", "0", "--quantization", "4bit"],
}
LAYOUTS = {
    "one GPU": [],
    "FSDP2": ["--enable_fsdp", "--fsdp_activation_checkpointing", "False"],
    "DDP": [],
}
DATA = ["--samsum_dataset.data_path", f"{ROOT}/datasets/samples/dialogue_summary", "--context_length", "512"]
KEEP_NOTHING = [
    "--save_every_steps",
    "0",
    "--save_every_minutes",
    "0",
    "--num_epochs",
    "1000",
    "--show_sample",
    "False",
]
LAST = 5


@dataclass(frozen=True)
class Combination:
    precision: str
    method: str
    layout: str

    def flags(self) -> list[str]:
        flags = [*PRECISIONS[self.precision], *METHODS[self.method], *LAYOUTS[self.layout], *UNCOMPILED]
        return flags if self.layout == "FSDP2" else [*flags, "--activation_checkpointing", "off"]


def train_base(folder: Path, shape: str, steps: int) -> Path:
    """Train the model that all combinations start from."""
    make_shape(folder / "shape", shape)
    flags = ["--model_name", str(folder / "shape"), "--random_weights", "--output_dir", str(folder / "base"), *DATA]
    flags += ["--batch_size_training", "8", "--max_train_step", str(steps), "--lr", "2e-4", "--warmup_steps", "10"]
    flags += [*KEEP_NOTHING, "--mixed_precision", "True", "--scheduler", "cosine", "--gradient_clipping"]
    flags += ["--run_validation", "False", "--activation_checkpointing", "off", *UNCOMPILED]
    failure = launch(flags, 1)
    if failure:
        sys.exit(f"training the base failed\n{failure}")
    losses = [event["loss"] for event in train_events(folder / "base")]
    print(f"base: loss {losses[0]:.3f} -> {statistics.mean(losses[-LAST:]):.3f} after {steps} steps", flush=True)
    return folder / "base" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--base_steps", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--at_once", type=int, default=4, help="runs that share the GPUs")
    options = parser.parse_args()
    rows = [Combination("fp32", method, "one GPU") for method in options.methods]  # the baseline
    wanted = product(options.methods, options.layouts, PRECISIONS)
    rows += [Combination(precision, method, layout) for method, layout, precision in wanted if is_of(precision, method)]
    measure(
        list(dict.fromkeys(rows)),
        shape=options.shape,
        nproc=options.nproc,
        steps=options.steps,
        base_steps=options.base_steps,
        at_once=options.at_once,
    )


def measure(rows: list[Combination], *, shape: str, nproc: int, steps: int, base_steps: int, at_once: int) -> None:
    """Run all combinations and print the table. The arguments are those of the flags."""
    num_gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as temporary:
        base = train_base(Path(temporary), shape, base_steps)

        def run(index: int) -> list[dict[str, Any]]:
            row, output = rows[index], Path(temporary) / f"run-{index}"
            num_processes = 1 if row.layout == "one GPU" else nproc
            flags = ["--model_name", str(base), "--output_dir", str(output), *DATA, *KEEP_NOTHING, *row.flags()]
            flags += ["--batch_size_training", str(8 // num_processes), "--max_train_step", str(steps)]
            flags += ["--run_validation", "False", "--save_model", "False"]
            alone = {"CUDA_VISIBLE_DEVICES": str(index % num_gpus)} if num_gpus and num_processes == 1 else {}
            failure = launch(flags, num_processes, alone)
            if failure:
                print(f"{row} failed\n{failure}", flush=True)
                return []
            events = read_events(output)
            loss, peak = mean_loss(events), events[-1]["peak_allocated_gib"]
            print(f"{row.method} | {row.layout} | {row.precision}: {loss:.4f}, {peak:.2f} GiB", flush=True)
            return events

        found: dict[Combination, list[dict[str, Any]]] = {}
        # Processes that share a GPU take turns on it, so the ranks of a run wait for each other: five such runs at once
        # moved fewer bytes per second than a single one.
        for several in (False, True):
            chosen = [index for index, row in enumerate(rows) if (row.layout != "one GPU") == several]
            num_at_once = 1 if several and nproc > num_gpus > 0 else at_once
            with ThreadPoolExecutor(num_at_once) as executor:
                found |= zip((rows[index] for index in chosen), executor.map(run, chosen), strict=True)
    print("\n| | | " + " | ".join(f"{p} loss | vs fp32 | peak GiB" for p in PRECISIONS) + " |")
    print("|---" * (2 + 3 * len(PRECISIONS)) + "|")
    for method, layout in dict.fromkeys((row.method, row.layout) for row in rows):
        wanted = mean_loss(found[Combination("fp32", method, "one GPU")])
        cells = [cell(found.get(Combination(precision, method, layout)), wanted) for precision in PRECISIONS]
        print(f"| {method} | {layout} | " + " | ".join(cells) + " |")


def cell(events: list[dict[str, Any]] | None, wanted: float) -> str:
    """Three columns; `events` is None for a combination that was not run, and empty for one that failed."""
    if not events:
        return " | |" if events is None else "failed | |"
    loss = mean_loss(events)
    return f"{loss:.4f} | {100 * (loss / wanted - 1):+.2f} % | {events[-1]['peak_allocated_gib']:.2f}"


def is_of(precision: str, method: str) -> bool:
    """Whether the combination makes sense: adapters are in fp32, so Kahan summation has nothing to keep."""
    return "Kahan" not in precision or method == "full"


def mean_loss(events: list[dict[str, Any]]) -> float:
    losses = [event["loss"] for event in events if event["event"] == "train"]
    return statistics.mean(losses[-LAST:]) if losses else float("nan")


if __name__ == "__main__":
    main()
