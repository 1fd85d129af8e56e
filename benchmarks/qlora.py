"""Memory and speed of QLoRA on weights from disk, compared with TRL on the same folder.

    python -m benchmarks.qlora --shape llama8b

Writes random bf16 weights of the shape (16 GB for llama8b), then fine-tunes them in 4 bits with LoRA r=8 on q_proj and
v_proj, with and without activation checkpointing, one row per GPU at a time. `host GiB` is the peak of a process's
private memory, without pages of files. TRL's rows need trl and liger-kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch
import yaml

from benchmarks.runs.launch import ROOT
from benchmarks.runs.measurements import WARMUP_STEPS, anonymous_bytes, read_events
from benchmarks.runs.shapes import SHAPES, make_random_weights
from utils.units import GIB

CHECKPOINTING = ("off", "full")


def watched(command: list[str], environment: dict[str, str]) -> tuple[str, int, float]:
    """Run a command; returns its output, its exit status, and the peak private memory of a process in GiB."""
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment)
        while process.poll() is None:
            try:
                pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
            except psutil.NoSuchProcess:
                break
            peak = max(peak, *(anonymous_bytes(pid) for pid in pids))
            time.sleep(0.05)
        status = process.wait()
        output.seek(0)
        return output.read(), status, peak / GIB


def visible(gpu: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(gpu)} if torch.cuda.is_available() else {}


def rows_of(options: argparse.Namespace) -> dict[str, str]:
    """Variables for benchmarks/runs/random_rows.py."""
    return {"ROW_LENGTH": str(options.length), "NUM_ROWS": str(options.micro_batch * options.steps)}


def ours(
    model: Path, options: argparse.Namespace, gpu: int, checkpointing: str, more: list[str], output: Path
) -> dict[str, Any]:
    flags = ["--model_name", str(model), "--output_dir", str(output), "--overwrite", "--use_peft"]
    flags += ["--dataset", f"{ROOT}/benchmarks/runs/random_rows.py:get_rows", "--run_validation", "False"]
    flags += ["--context_length", str(options.length), "--batch_size_training", str(options.micro_batch)]
    flags += ["--max_train_step", str(options.steps), "--num_epochs", "100", "--save_model", "False"]
    flags += ["--save_every_steps", "0", "--save_every_minutes", "0", "--quantization", "4bit"]
    flags += ["--activation_checkpointing", checkpointing, *more]
    printed, status, host = watched(
        [sys.executable, str(ROOT / "finetuning.py"), *flags], rows_of(options) | visible(gpu)
    )
    if status:
        return {"failed": printed[-1500:]}
    events = read_events(output)
    train = [event for event in events if event["event"] == "train"][WARMUP_STEPS:]
    return {
        "peak_gib": events[-1]["peak_allocated_gib"],
        "tokens_per_second": statistics.median(event["tokens_per_second"] for event in train),
        "host_gib": host,
        "load_seconds": yaml.safe_load((output / "run.yaml").read_text())["model"]["load_seconds"],
    }


def peer(model: Path, options: argparse.Namespace, gpu: int, checkpointing: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.peers.trl_trainer", str(model), "--method", "qlora"]
    command += ["--length", str(options.length), "--micro_batch", str(options.micro_batch)]
    command += ["--steps", str(options.steps), f"--activation_checkpointing={checkpointing == 'full'}"]
    printed, status, host = watched(command, rows_of(options) | visible(gpu))
    return json.loads(printed.splitlines()[-1]) | {"host_gib": host} if status == 0 else {"failed": printed[-1500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    lanes: SimpleQueue[int] = SimpleQueue()
    for gpu in range(max(1, torch.cuda.device_count())):
        lanes.put(gpu)

    def on_a_gpu(measure: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        gpu = lanes.get()
        try:
            return measure(gpu)
        finally:
            lanes.put(gpu)

    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        print(f"checkpoint: {make_random_weights(model, options.shape):.1f} GB", flush=True)
        measures: dict[str, Callable[[int], dict[str, Any]]] = {}
        for checkpointing in CHECKPOINTING:
            for index, (name, compiles) in enumerate((("ours", "False"), ("ours, compiled", "True"))):
                output = Path(temporary) / f"run-{checkpointing}-{index}"
                measures[f"{name} | {checkpointing}"] = partial(
                    ours, model, options, checkpointing=checkpointing, more=["--compile", compiles], output=output
                )
            if options.peer:
                measures[f"TRL + Liger | {checkpointing}"] = partial(peer, model, options, checkpointing=checkpointing)
        with ThreadPoolExecutor(lanes.qsize()) as executor:
            rows = dict(zip(measures, executor.map(on_a_gpu, measures.values()), strict=True))
    columns = ("peak_gib", "tokens_per_second", "host_gib", "load_seconds")
    print(
        "\n| what | activation checkpointing | peak GiB | tokens/s | host GiB | s to load |\n|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        cells = [f"{row[key]:,.2f}" if key in row else "" for key in columns]
        print(f"| {name} | " + (f"failed: {row['failed']}" if "failed" in row else " | ".join(cells)) + " |")


if __name__ == "__main__":
    main()
