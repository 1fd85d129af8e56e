"""Does --direct_collectives change a bit, in any layout? Runs with it beside runs without, as one table.

    python -m benchmarks.direct_collectives --at_once 4                  two GPUs
    python -m benchmarks.direct_collectives --device cpu --layouts bf16 --steps 3

Each layout trains a small Llama on the shipped dialogues over --nproc ranks, --times packed and as often directly, by
deterministic kernels. Losses and gradient norms of all steps and the saved weights are compared bit by bit with those
of the first packed run. A stream that reads what another still writes would show here: so runs share the GPUs,
--at_once of them, and are as late as they then are. The exit status is 1 if any layout differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import load

from benchmarks.gpu_matrix import DEVICES
from benchmarks.runs.launch import ROOT, last_line, launch
from benchmarks.runs.measurements import train_events
from tools.make_tiny_model import make_tiny_model

BF16, LORA = ["--pure_bf16"], ["--use_peft", "--lora_config.target_modules", "all-linear", "--lora_config.r", "16"]
CAST = ["--mixed_precision", "True"]
LAYOUTS = {
    "bf16": [*BF16, "--activation_checkpointing", "off"],
    "bf16, recomputed, clipped": [*BF16, "--activation_checkpointing", "full", "--gradient_clipping"],
    "bf16, compiled": [*BF16, "--compile"],
    "bf16, accumulated": [*BF16, "--gradient_accumulation_steps", "3"],
    "bf16, kept after forward": [*BF16, "--sharding_strategy", "SHARD_GRAD_OP"],
    "bf16, states in host memory": [*BF16, "--optimizer_cpu_offload"],
    "cast, reduced in fp32": CAST,
    "cast, reduced in bf16, compiled": [*CAST, "--reduce_dtype", "bf16", "--compile"],
    "LoRA, gathered": [*LORA, "--num_replicated_layers", "0", "--compile"],
    "QLoRA, gathered": [*LORA, "--num_replicated_layers", "0", "--quantization", "4bit"],
    "QLoRA, compiled, recomputed": [
        *(*LORA, "--num_replicated_layers", "0", "--quantization", "4bit"),
        *("--compile", "--activation_checkpointing", "full"),
    ],
    "evaluated, answers generated": [*BF16, "--run_validation", "True", "--eval_generate", "--max_new_tokens", "8"],
}
DIRECT = ["--direct_collectives"]
FIRST = "packed 1"


def ways(times: int) -> dict[str, list[str]]:
    """The flags of each run of a layout."""
    flags: dict[str, list[str]] = {"packed": [], "direct": DIRECT}
    return {f"{way} {n}": flags[way] for way in flags for n in range(1, times + 1)}


def train(flags: Sequence[str], model: Path, folder: Path, options: argparse.Namespace) -> str:
    """The end of what a run printed if it failed, else nothing."""
    words = ["--model_name", str(model), "--output_dir", str(folder), "--enable_fsdp", "--deterministic", *flags]
    defaults = {
        "--samsum_dataset.data_path": str(ROOT / "datasets/samples/dialogue_summary"),
        "--context_length": str(DEVICES[options.device].length),
        "--batch_size_training": "4",
        "--max_train_step": str(options.steps),
        "--num_epochs": "100",
        "--run_validation": "False",
        "--save_every_steps": "0",
        "--compile": "False",
    }
    words += [word for name, value in defaults.items() if name not in flags for word in (name, value)]
    return launch(words, options.nproc, DEVICES[options.device].variables, by_torchrun=True, limit_seconds=300)


def differences(run: Path, packed: Path) -> list[str]:
    """What of a run is not that of the packed one."""
    found = []
    steps = [[(event["loss"], event["grad_norm"]) for event in train_events(folder)] for folder in (run, packed)]
    if steps[0] != steps[1] or not steps[0]:
        pairs = enumerate(zip(*steps, strict=False), 1)
        found.append(next((f"step {n}: loss and norm {a} for {b}" for n, (a, b) in pairs if a != b), "other steps"))
    weights = [weights_of(folder) for folder in (run, packed)]
    if weights[0].keys() != weights[1].keys() or not weights[0]:
        return [*found, "names of weights"]
    others = [name for name, tensor in weights[0].items() if not tensor.equal(weights[1][name])]
    return [*found, f"{len(others)} weights, such as {others[0]}"] if others else found


def weights_of(run: Path) -> dict[str, Any]:
    files = [file for part in ("model", "adapter") for file in sorted((run / part).glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in load(file.read_bytes()).items()}


def line(layout: str, folder: Path, failures: dict[str, str]) -> str:
    """The line of a layout in the table."""
    cells = [layout]
    for way, failure in failures.items():
        if failure:
            cells.append(f"failed: {last_line(failure)}")
        elif way == FIRST or failures[FIRST]:
            cells.append("trained")
        else:
            cells.append("; ".join(differences(folder / way, folder / FIRST)) or "same bits")
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--device", choices=sorted(DEVICES), default="cuda")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--at_once", type=int, default=1, help="runs at a time")
    parser.add_argument("--times", type=int, default=2, help="runs of a layout each way")
    options = parser.parse_args(argv)
    flags_of = ways(options.times)
    lines = [f"| layout | {' | '.join(flags_of)} |", "|---" * (len(flags_of) + 1) + "|"]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.at_once) as pool:
        folder = Path(temporary)
        model = make_tiny_model(folder / "model", **DEVICES[options.device].model)
        runs = {
            layout: {
                way: pool.submit(train, [*LAYOUTS[layout], *flags], model, folder / layout / way, options)
                for way, flags in flags_of.items()
            }
            for layout in options.layouts
        }
        for layout, of_layout in runs.items():
            failures = {way: run.result() for way, run in of_layout.items()}
            lines.append(line(layout, folder / layout, failures))
            print(*filter(None, failures.values()), lines[-1], sep="\n", flush=True)
    print("", *lines, sep="\n")
    return int(any(text.count("same bits") < len(flags_of) - 1 for text in lines[2:]))


if __name__ == "__main__":
    sys.exit(main())
