"""Summarisation by an encoder-decoder: finetuning.py beside transformers' Seq2SeqTrainer, on the same rows.

    python -m benchmarks.summarization --nproc 4

The shape is bart-large-cnn's with random weights; the rows are as long as SAMSum's (1,024 tokens of source and 128 of
target at most). Each row of the table is one run, and they follow one another in one call. Step seconds are the median
after warm-up; a whole epoch of SAMSum's 14,732 rows is figured from them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import BartConfig

from benchmarks.launch import ROOT, launch
from benchmarks.measurements import WARMUP_STEPS, read_events
from benchmarks.random_rows import samsum_like_lengths
from tools.make_tiny_model import make_tiny_model

NUM_ROWS = 14_732  # of SAMSum's training split
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab_size": 600},
    # bart-large-cnn (Lewis et al., 2020), from its published config.json
    "bart-large": {"d_model": 1024, "layers": 12, "heads": 16, "ffn": 4096, "vocab_size": 50264},
}


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


def ours(folder: Path, options: argparse.Namespace, name: str, flags: list[str]) -> dict[str, Any]:
    output = folder / name
    common = ["--model_name", str(folder / "model"), "--random_weights", "--output_dir", str(output)]
    common += ["--dataset", "custom_dataset", "--custom_dataset.data_path", str(folder / "rows.parquet")]
    common += ["--run_validation", "False", "--save_model", "False", "--save_every_steps", "0"]
    common += ["--save_every_minutes", "0", "--show_sample", "False", "--max_train_step", str(options.steps)]
    common += ["--lr", "5e-5", "--scheduler", "linear", "--warmup_steps", "500", "--weight_decay", "0.01"]
    common += ["--gradient_clipping", "--batch_size_training", str(options.micro_batch)]
    common += ["--gradient_accumulation_steps", str(options.accumulation), *flags]
    print("$ finetuning.py", *common, flush=True)
    failure = launch(common, options.nproc, by_torchrun=options.nproc > 1)
    events = read_events(output)
    train = [event for event in events if event["event"] == "train"]
    if failure or len(train) < options.steps:
        print(f"{name}: {failure}", flush=True)
        return {}
    return {
        "step_seconds": statistics.median(event["step_seconds"] for event in train[WARMUP_STEPS:]),
        "peak_gib": events[-1]["peak_allocated_gib"] or 0.0,
        "losses": [event["loss"] for event in train],
    }


def peer(folder: Path, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.nproc)]
    given = [str(folder / "model"), str(folder / "rows.parquet"), "--steps", str(options.steps)]
    given += ["--micro_batch", str(options.micro_batch), "--accumulation", str(options.accumulation), *flags]
    command = [sys.executable, *launcher, "-m", "benchmarks.summarization_peer", *given]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"peer: exit {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}", flush=True)
        return {}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="bart-large")
    parser.add_argument("--nproc", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=16)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--fsdp", action="store_true", help="a row for FULL_SHARD, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", options.shape)
        count = min(NUM_ROWS, options.steps * options.micro_batch * options.accumulation * options.nproc)
        make_rows(folder / "rows.parquet", SHAPES[options.shape]["vocab_size"], count)
        found = {
            "Trainer": peer(folder, options, []),
            "ours": ours(folder, options, "plain", []),
            "ours, compiled": ours(folder, options, "compiled", ["--compile"]),
            "Trainer, compiled": peer(folder, options, ["--compile"]),
        }
        if options.fsdp:
            found["ours, FULL_SHARD"] = ours(folder, options, "sharded", ["--enable_fsdp", "--compile"])
    micro_batches = -(-NUM_ROWS // (options.micro_batch * options.nproc))
    print(f"{NUM_ROWS:,} rows over {options.nproc} ranks: {micro_batches:,} micro-batches per rank and epoch")
    print(
        "| run | s per step | min per epoch | peak GiB | of Trainer's speed | first loss | last loss |\n|" + "---|" * 7
    )
    reference = found["Trainer"].get("step_seconds")
    for name, row in found.items():
        if not row:
            print(f"| {name} | failed |")
            continue
        minutes = row["step_seconds"] * micro_batches / options.accumulation / 60
        ratio = f"{reference / row['step_seconds']:.2f}" if reference else ""
        losses = f"{row['losses'][0]:.3f} | {row['losses'][-1]:.3f}"
        print(f"| {name} | {row['step_seconds']:.3f} | {minutes:.1f} | {row['peak_gib']:.2f} | {ratio} | {losses} |")


if __name__ == "__main__":
    main()
