"""Summarization by an encoder-decoder: finetuning.py next to transformers' Seq2SeqTrainer, on the same rows.

    python -m benchmarks.summarization --nproc 4 --rows Trainer ours ours-4

The shape is bart-large-cnn's with random weights; the rows are as long as SAMSum's (1,024 tokens of source and 128 of
target at most). Each row of the table is one run, and they follow one another in one call. Step seconds are the median
after warm-up; an epoch's minutes over SAMSum's 14,732 rows are figured from them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import BartConfig

from benchmarks.runs.launch import ROOT, UNCOMPILED, launch
from benchmarks.runs.measurements import WARMUP_STEPS, read_events
from benchmarks.runs.random_rows import samsum_like_lengths
from tools.make_tiny_model import make_tiny_model

NUM_ROWS = 14_732  # of SAMSum's training split
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab_size": 600},
    # bart-large-cnn (Lewis et al., 2020), from its published config.json
    "bart-large": {"d_model": 1024, "layers": 12, "heads": 16, "ffn": 4096, "vocab_size": 50264},
}


@dataclass(frozen=True)
class Row:
    """One run: a global batch of 16 rows per rank, cut into micro-batches."""

    name: str
    micro_batch: int
    accumulation: int
    flags: tuple[str, ...] = ()


ROWS = [
    Row("Trainer", 1, 16),
    Row("ours", 1, 16, UNCOMPILED),
    Row("ours-4", 4, 4, UNCOMPILED),
    Row("Trainer-4", 4, 4),
    Row("ours-FULL_SHARD", 1, 16, ("--enable_fsdp", *UNCOMPILED)),
    Row("ours-compiled", 1, 16, ("--compile",)),
    Row("Trainer-compiled", 1, 16, ("--compile",)),
]


def make_model(folder: Path, shape: str) -> None:
    """A model folder with the shape's config.json and some tokenizer, but no weights."""
    make_tiny_model(folder, vocab_size=600, hidden_size=32, num_layers=1)
    (folder / "model.safetensors").unlink()
    size = SHAPES[shape]
    sides = {
        f"{side}_{name}": size[key]
        for side in ("encoder", "decoder")
        for name, key in (("layers", "layers"), ("attention_heads", "heads"), ("ffn_dim", "ffn"))
    }
    BartConfig(
        vocab_size=size["vocab_size"],
        d_model=size["d_model"],
        max_position_embeddings=1024,
        attention_dropout=0.0,
        architectures=["BartForConditionalGeneration"],
        **sides,
    ).save_pretrained(folder)


def make_rows(file: Path, vocab_size: int, count: int) -> None:
    """Pairs of random tokens as long as SAMSum's: half of the summaries are shorter than 24 tokens."""
    generator = np.random.default_rng(0)
    sources = samsum_like_lengths(generator, count, longest=1024)
    targets = np.clip(generator.lognormal(np.log(24), 0.5, count), 4, 128).astype(np.int64)
    drawn = [[generator.integers(4, vocab_size, size=length) for length in lengths] for lengths in (sources, targets)]
    datasets.Dataset.from_dict({"input_ids": drawn[0], "labels": drawn[1]}).to_parquet(file)


def ours(folder: Path, row: Row, nproc: int, steps: int) -> dict[str, Any]:
    output = folder / f"run-{row.name}"
    flags = ["--model_name", str(folder / "model"), "--random_weights", "--output_dir", str(output)]
    flags += ["--dataset", "custom_dataset", "--custom_dataset.data_path", str(folder / "rows.parquet")]
    flags += ["--run_validation", "False", "--save_model", "False", "--save_every_steps", "0"]
    flags += ["--save_every_minutes", "0", "--show_sample", "False", "--max_train_step", str(steps)]
    flags += ["--lr", "5e-5", "--scheduler", "linear", "--warmup_steps", "500", "--weight_decay", "0.01"]
    flags += ["--gradient_clipping", "--batch_size_training", str(row.micro_batch)]
    flags += ["--gradient_accumulation_steps", str(row.accumulation), *row.flags]
    print("$ finetuning.py", *flags, flush=True)
    failure = launch(flags, nproc, by_torchrun=nproc > 1)
    events = read_events(output)
    train = [event for event in events if event["event"] == "train"]
    if failure or len(train) < steps:
        print(f"{row.name}: {failure}", flush=True)
        return {}
    return {
        "step_seconds": statistics.median(event["step_seconds"] for event in train[WARMUP_STEPS:]),
        "peak_gib": events[-1]["peak_allocated_gib"] or 0.0,
        "losses": [event["loss"] for event in train],
    }


def peer(folder: Path, row: Row, nproc: int, steps: int) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    given = [str(folder / "model"), str(folder / "rows.parquet"), "--steps", str(steps)]
    given += ["--micro_batch", str(row.micro_batch), "--accumulation", str(row.accumulation), *row.flags]
    command = [sys.executable, *launcher, "-m", "benchmarks.peers.seq2seq_trainer", *given]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{row.name}: exit {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}", flush=True)
        return {}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="bart-large")
    parser.add_argument("--nproc", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    table = ["| run | rows x accumulation | s per step | min per epoch | peak GiB | x Trainer | first and last loss |"]
    table += ["|" + "---|" * 7]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", options.shape)
        make_rows(folder / "rows.parquet", SHAPES[options.shape]["vocab_size"], NUM_ROWS)
        reference = None
        for row in ROWS:
            if row.name not in options.rows:
                continue
            measure = peer if row.name.startswith("Trainer") else ours
            found = measure(folder, row, options.nproc, options.steps)
            if not found:
                table += [f"| {row.name} | failed |"]
                continue
            reference = reference or found["step_seconds"]
            steps_per_epoch = NUM_ROWS / (row.micro_batch * row.accumulation * options.nproc)
            table += [
                f"| {row.name} | {row.micro_batch} x {row.accumulation} | {found['step_seconds']:.3f} "
                f"| {found['step_seconds'] * steps_per_epoch / 60:.1f} | {found['peak_gib']:.2f} "
                f"| {reference / found['step_seconds']:.2f} | {found['losses'][0]:.3f} -> {found['losses'][-1]:.3f} |"
            ]
            print(table[-1], flush=True)
    print(f"{NUM_ROWS:,} rows: {-(-NUM_ROWS // options.nproc):,} micro-batches of one row per rank and epoch")
    print("\n".join(table))


if __name__ == "__main__":
    main()
