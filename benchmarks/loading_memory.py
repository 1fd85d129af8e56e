"""Host memory for loading: bf16 weights into fp32 shards on several CPU processes.

    python -m benchmarks.loading_memory --nproc 4

Prints, for each way to load, the peak of the anonymous (private) memory of all processes together, above that after
their imports. The sharded model is included. One copy is the model's weights in fp32. Mapped pages of files belong to
the page cache and are not counted.
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

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.runs.measurements import MIB, anonymous_bytes
from configs.flags import parse_flags
from policies.building import build_for_training
from policies.sharding import shard
from policies.wrapping import find_units
from ranks.environment import read_environment
from ranks.process_group import start_process_group, stop_process_group
from resolving.resolved import resolve
from utils.atomic_write import write_atomically

WAYS = {
    "--low_cpu_fsdp": ["--enable_fsdp", "--low_cpu_fsdp"],
    "without the flag": ["--enable_fsdp"],
    "--use_peft --quantization 4bit": ["--enable_fsdp", "--use_peft", "--quantization", "4bit"],
    "from_pretrained on every rank, then sharded": None,  # as in a plain script
}
SHAPES: dict[str, dict[str, Any]] = {
    "500m": {
        "vocab_size": 32000,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
    },
    "tiny": {
        "vocab_size": 600,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}


def load(way: str, model: str) -> None:
    """Load the model in one of several processes, in the given way."""
    flags, env = WAYS[way], read_environment()
    config = parse_flags(["--model_name", model, *(flags or ["--enable_fsdp"])])
    resolved = resolve(config, env, resumed_size=None)
    precision = resolved.policies.precision
    if flags is None:
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=precision.storage_dtype)
        shard(whole, find_units(whole), resolved.policies.layout, precision, env.device)
        return
    build_for_training(
        config,
        resolved.model_config,
        task=resolved.task,
        policies=resolved.policies,
        row_length=resolved.context_length,
        num_embeddings=0,
        env=env,
    )


def work(way: str, model: str, folder: Path) -> None:
    """Run in each process: write its memory after the imports to `folder`, load, write the seconds."""
    env = read_environment()
    start_process_group(env)
    pid = os.getpid()
    write_atomically(folder / f"{pid}.baseline", str(anonymous_bytes(pid)))
    dist.barrier()
    time.sleep(1)  # until the parent has seen every file
    started = time.perf_counter()
    load(way, model)
    dist.barrier()
    seconds = time.perf_counter() - started
    time.sleep(0.2)
    if env.is_rank_zero:
        (folder / "seconds").write_text(str(seconds))
    stop_process_group()


def measure(way: str, model: Path, nproc: int) -> tuple[float, float]:
    """The peak of all processes together above their baselines in bytes, and the seconds to load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
        command += ["-m", "benchmarks.loading_memory", f"--worker={way}", "--model", str(model), "--folder", name]
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
            peak = 0
            while process.poll() is None:
                baselines = {int(file.stem): int(file.read_text()) for file in folder.glob("*.baseline")}
                if len(baselines) == nproc:
                    peak = max(peak, sum(max(0, anonymous_bytes(pid) - base) for pid, base in baselines.items()))
                time.sleep(0.002)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        return peak, float((folder / "seconds").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="500m")
    parser.add_argument("--json", action="store_true", help="print the copies as one JSON object")
    for name in ("worker", "model", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.model, Path(options.folder))
    with tempfile.TemporaryDirectory() as name:
        config = LlamaConfig(**SHAPES[options.shape], tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        copy = 4 * sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(name, max_shard_size="300MB")
        del model
        rows = {way: measure(way, Path(name), options.nproc) for way in WAYS}
    if options.json:
        print(json.dumps({way: peak / copy for way, (peak, _) in rows.items()}))
        return None
    print(f"{copy / 4:,.0f} parameters, one fp32 copy is {copy / MIB:,.0f} MiB, {options.nproc} processes\n")
    print("| loading | peak of all processes, MiB | copies | seconds |\n|---|---|---|---|")
    for way, (peak, seconds) in rows.items():
        print(f"| {way} | {peak / MIB:,.0f} | {peak / copy:.2f} | {seconds:.1f} |")
    return None


if __name__ == "__main__":
    main()
