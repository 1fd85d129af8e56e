"""Host memory and speed of streaming a JSONL file that is larger than memory should be.

    python -m benchmarks.streaming_memory --gib 5 [--num_workers 1] [--minutes 10] [--other_bytes 8000]

Writes a file of random dialogues to a temporary folder, with a column of `other_bytes` that training does not use.
Reads it in another process like a run with --streaming: tokenized, shuffled in the buffer, packed. Prints the peak of
the anonymous (private) memory of that process and its workers, above that after the imports, and how fast rows came.
There is no model.
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
from typing import Any

import numpy as np
import psutil

from benchmarks.runs.measurements import MIB
from configs.flags import parse_flags
from data.batches.layout import BatchLayout
from data.batches.padding import padding_id
from data.loaders import make_loaders
from data.pipeline import load_data
from data.processors.tokenizer_loading import load_tokenizer
from data.sequences.causal import build_sequences
from ranks.environment import read_environment
from tasks.causal_batches import Collator
from tools.make_tiny_model import make_tiny_model

SAMPLES = Path(__file__).parent.parent / "datasets/samples/dialogue_summary/validation.jsonl"  # for their words
TEXTS = 20_000  # different dialogues; the file repeats them
TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4}


def write_dialogues(path: Path, num_bytes: int, other_bytes: int) -> int:
    """Write `num_bytes` of random dialogues with lognormal lengths like SAMSum's; returns their number."""
    rng = np.random.default_rng(0)
    words = np.array(SAMPLES.read_text(encoding="utf-8").split())
    lengths = np.clip(rng.lognormal(np.log(90), 0.7, size=TEXTS), 10, 1200).astype(int)
    lines = [
        json.dumps({"dialogue": " ".join(rng.choice(words, size=n)), "summary": " ".join(rng.choice(words, size=20))})
        for n in lengths
    ]
    if other_bytes:
        other = " ".join(rng.choice(words, size=other_bytes))[:other_bytes]
        lines = [json.dumps(json.loads(line) | {"other": other}) for line in lines]
    written, num_rows = 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < num_bytes:
            for line in lines:
                written += file.write(line + "\n")
            num_rows += len(lines)
    return num_rows


def read(options: argparse.Namespace) -> None:
    """Run in the reading process: print "ready" after the imports, read for a pass or some minutes, print figures."""
    print("ready", flush=True)
    sys.stdin.readline()
    flags = ["--model_name", options.model, "--dataset", "samsum_dataset", "--streaming", "--norun_validation"]
    flags += ["--samsum_dataset.data_path", options.data, "--max_train_step", str(10**9)]
    flags += ["--num_workers_dataloader", str(options.num_workers), "--context_length", "2048"]
    config, env = parse_flags(flags), read_environment()
    tokenizer = load_tokenizer(config.train_config)
    vocab_size = len(tokenizer)
    data = load_data(
        config.train_config,
        config.dataset_configs,
        tokenizer,
        build_sequences=build_sequences,
        vocab_size=vocab_size,
        context_length=2048,
    )
    said: list[str] = []
    collate = Collator(packing=True, padding_id=padding_id(tokenizer, vocab_size))
    loaders = make_loaders(data, config.train_config, BatchLayout(4, 1, 1), env, lambda num_rows: collate, said.append)
    started = time.perf_counter()
    num_samples = num_tokens = num_rows = 0
    for micro_batches in loaders.train.epoch(0):
        for batch in micro_batches:
            num_samples += len(batch.source_rows)
            num_tokens += batch.num_tokens
            num_rows += len(batch.input_ids)
        if said or time.perf_counter() - started > 60 * options.minutes:
            break
    seconds = time.perf_counter() - started
    print(json.dumps({"samples": num_samples, "tokens": num_tokens, "rows": num_rows, "seconds": seconds}), flush=True)
    sys.stdin.readline()


def anonymous_bytes(process: psutil.Process) -> int:
    """Private memory of a process and its children; pages that a fork shares count once."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=5)
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="read no longer than this")
    parser.add_argument("--other_bytes", type=int, default=0, help="of a column besides the text, in every row")
    for name in ("data", "model"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data:
        return read(options)
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model", tie_word_embeddings=True, vocab_size=8000, **TINY)
        data = Path(name) / "train.jsonl"
        num_rows = write_dialogues(data, int(options.gib * 2**30), options.other_bytes)
        command = [sys.executable, "-m", "benchmarks.streaming_memory", "--model", str(model), "--data", str(data)]
        command += ["--num_workers", str(options.num_workers), "--minutes", str(options.minutes)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            process = psutil.Process(reader.pid)
            os.set_blocking(reader.stdout.fileno(), False)
            baseline = peak = anonymous_bytes(process)
            print("", file=reader.stdin, flush=True)
            while not (line := reader.stdout.readline()) and reader.poll() is None:
                peak = max(peak, anonymous_bytes(process))
                time.sleep(0.05)
            print("", file=reader.stdin, flush=True)
    found = json.loads(line)
    print(f"{options.gib:g} GiB, {num_rows:,} dialogues; reading processes: {options.num_workers}")
    print(f"peak of private memory above the imports' {baseline / MIB:,.0f} MiB: {(peak - baseline) / MIB:,.0f} MiB")
    seconds = found.pop("seconds")
    print(", ".join(f"{count:,} {name}" for name, count in found.items()) + f" in {seconds:.0f} s; per second:")
    print(", ".join(f"{count / seconds:,.0f} {name}" for name, count in found.items()))
    return None


if __name__ == "__main__":
    main()
