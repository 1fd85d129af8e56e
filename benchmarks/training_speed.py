"""Speed and memory of real runs of finetuning.py with random weights of a named shape, as a table.

    python -m benchmarks.training_speed --rows tinyllama-full tinyllama-lora --nproc 1

Every row is one command, printed before it runs; tokens/s is the median over the steps after warm-up.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from tools.make_tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
WARMUP_STEPS = 5
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    # TinyLlama-1.1B (Zhang et al., 2024), from its published config.json
    "tinyllama": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    # Llama-3.1-8B (Meta, 2024), from its published config.json
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
}
LORA = ["--use_peft"]


@dataclass(frozen=True)
class Row:
    shape: str
    micro_batch: int
    length: int
    flags: list[str] = field(default_factory=list)


ROWS = {
    "tiny-full": Row("tiny", 2, 128),
    "tiny-lora": Row("tiny", 2, 128, LORA),
    "tinyllama-full": Row("tinyllama", 8, 2048, ["--pure_bf16"]),
    "tinyllama-full-compiled": Row("tinyllama", 8, 2048, ["--pure_bf16", "--compile"]),
    "tinyllama-mixed": Row("tinyllama", 8, 2048),
    "tinyllama-lora": Row("tinyllama", 8, 2048, LORA),
    "tinyllama-lora-compiled": Row("tinyllama", 8, 2048, [*LORA, "--compile"]),
    "llama8b-full": Row("llama8b", 2, 4096, ["--pure_bf16"]),
    "llama8b-lora": Row("llama8b", 2, 4096, LORA),
}


def make_shape(folder: Path, shape: str) -> None:
    """A folder with the shape's config.json and any tokenizer; it holds no weights."""
    make_tiny_model(folder, vocab_size=600, hidden_size=32, num_layers=1)
    (folder / "model.safetensors").unlink()
    LlamaConfig(
        **({"max_position_embeddings": 8192} | SHAPES[shape]), architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)


def measure(name: str, nproc: int, steps: int, extra: list[str], folder: Path) -> dict[str, str]:
    row = ROWS[name]
    model, output = folder / row.shape, folder / f"run-{name}"
    if not model.exists():
        make_shape(model, row.shape)
    flags = ["--model_name", str(model), "--random_weights", "--output_dir", str(output), "--overwrite"]
    flags += ["--dataset", str(ROOT / "benchmarks/random_rows.py:get_rows"), "--run_validation", "False"]
    flags += ["--context_length", str(row.length), "--batch_size_training", str(row.micro_batch)]
    flags += ["--max_train_step", str(steps), "--num_epochs", "100", "--save_model", "False", *row.flags, *extra]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)] if nproc > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "finetuning.py"), *flags]
    print("$", " ".join(command), flush=True)
    rows = row.micro_batch * nproc * steps
    environment = os.environ | {"ROW_LENGTH": str(row.length), "NUM_ROWS": str(rows)}
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-3000:], flush=True)
        return {
            "row": name,
            "GPUs": str(nproc),
            "flags": " ".join(row.flags + extra),
            "result": f"exit {done.returncode}",
        }
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    train = [event for event in events if event["event"] == "train"]
    steady = train[min(WARMUP_STEPS, len(train) - 1) :]
    speed = statistics.median(event["tokens_per_second_per_device"] for event in steady)
    tflops = statistics.median(event["model_tflops_per_device"] for event in steady)
    peak = max(event["peak_allocated_gib"] for event in events if event["event"] == "memory")
    wait = sum(event["data_wait_seconds"] for event in steady) / sum(event["step_seconds"] for event in steady)
    return {
        "row": name,
        "GPUs": str(nproc),
        "flags": " ".join(row.flags + extra),
        "tokens/s/GPU": f"{speed:,.0f}",
        "TFLOP/s": f"{tflops:.0f}",
        "peak GiB": f"{peak:.1f}",
        "data wait": f"{100 * wait:.1f} %",
        "loss": f"{train[0]['loss']:.3f} -> {train[-1]['loss']:.3f}",
        "wall s": f"{wall:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), required=True)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--flags", default="", help="flags of finetuning.py to add to every row, in one string")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = [
            measure(name, options.nproc, options.steps, options.flags.split(), Path(folder)) for name in options.rows
        ]
    headings = list(dict.fromkeys(key for result in table for key in result))
    print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for result in table:
        print("| " + " | ".join(result.get(heading, "") for heading in headings) + " |")


if __name__ == "__main__":
    main()
