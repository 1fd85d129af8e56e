"""Speed and memory next to other tools, on the same weights and tokens in one call, as one table.

    python -m benchmarks.peer_speed --results speed.jsonl --rows P1 P2 --peer_path peers --minutes 9
    python -m benchmarks.peer_speed --results speed.jsonl --rows P2 --ours="--float8 tensorwise" --peers

The peers are run by their own entry points (benchmarks/peers). --peer_path is a folder with a folder of packages for
each of them (trl, torchtune, unsloth, axolotl, nemo_automodel), since they pin versions that exclude each other. All
clip gradients at 1.0, train at one constant learning rate and without dropout. Each --ours= gives flags of
finetuning.py, for a line of the table; empty: none. The losses of the first ten steps are compared with those of the
row's first finetuning.py; packed rows differ from tool to tool. Tokens of pairs are those of both texts, also if they
share their prompt: so tokens/s compare pairs/s, and TFLOP/s of peers, which compute a prompt twice, are too low. Clock
and power are nvidia-smi's while steps run. The rate of a large bf16 matrix product is measured in each call. Lines that
--results holds are not run again, and a call begins nothing after --minutes. Machines differ by some percent, so
compare lines of one machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.peers.calls import PEERS, can_run, run_peer
from benchmarks.peers.peer_work import COMPARED_LOSSES, OUR_ADAPTER_FLAGS, OUR_FLAGS
from benchmarks.runs import random_rows
from benchmarks.runs.card import CardSamples
from benchmarks.runs.measurements import WARMUP_STEPS, speed_figures, teraflops_per_token
from benchmarks.runs.shapes import make_random_weights
from benchmarks.runs.workload import Workload
from benchmarks.training_speed import ROWS as WORKLOADS
from benchmarks.training_speed import run as run_ours

ROWS = {
    "P1": "tinyllama-full-compiled",
    "P2": "llama8b-full",
    "P3": "llama8b-full-ac",
    "P4": "llama8b-lora",
    "P5": "llama8b-qlora",
    "P6": "llama8b-full-4-full_shard",
    "P7": "tinyllama-packed",
    "P8": "qwen3-8b-dpo-lora",
    "P9": "qwen3-8b-dpo-lora-uneven",
    "P10": "llama8b-lora-all",
    "P11": "llama8b-qlora-all",
    "P12": "llama8b-lora-all-packed",
    "P13": "llama8b-lora-all-padded",
    "P14": "qwen3-moe-lora",
    "P15": "qwen3-8b-dpo-lora-off",
    "tiny": "tiny-full",
    "tiny-lora": "tiny-lora",
    "tiny-lora-all": "tiny-lora-all",
    "tiny-packed": "tiny-packed",
    "tiny-padded": "tiny-padded",
    "tiny-dpo": "tiny-dpo-lora",
}
"""Workloads of benchmarks/training_speed.py."""


CLIPPED = ["--gradient_clipping", "--gradient_clipping_threshold", "1.0"]
CEILING = "bf16 matrix product"
HEADINGS = [
    *("row", "tool", "tokens/s per GPU", "of the fastest peer", "TFLOP/s", "of the ceiling", "peak GiB", "first loss"),
    *("losses at most apart", "SM MHz", "W", "settings"),
]


def matrix_product_tflops(size: int = 8192, rounds: int = 20) -> float:
    """The rate of a product of two square bf16 matrices, in TFLOP/s; NaN without a GPU."""
    if not torch.cuda.is_available():
        return math.nan
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.mm(left, right)
        last.record()
        last.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def same_work(row: Workload) -> list[str]:
    """Flags of finetuning.py besides the row's, for what the peers are asked for. Rows of preferences name their own
    dropout."""
    is_adapted = "--use_peft" in row.flags and OUR_ADAPTER_FLAGS[0] not in row.flags
    return [*CLIPPED, *OUR_FLAGS, *(OUR_ADAPTER_FLAGS if is_adapted else [])]


def ours(
    name: str, row: Workload, flags: list[str], steps: int, folder: Path, limit_seconds: float | None
) -> dict[str, Any]:
    """The figures of a run of finetuning.py."""
    gpu = 0 if row.nproc == 1 and torch.cuda.device_count() > 1 else None
    try:
        events = run_ours(name, row, steps, [*same_work(row), *flags], folder, gpu, limit_seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished in {limit_seconds:.0f} s"}
    train = [event for event in events if event["event"] == "train"]
    if len(train) <= WARMUP_STEPS:
        return {"failed": "see what it printed"}
    figures = speed_figures(events)
    figures["tokens_per_second"] *= own_tokens(row, train, steps)
    return figures | {"losses": [event["loss"] for event in train[:COMPARED_LOSSES]]}


def own_tokens(row: Workload, train: Sequence[Mapping[str, Any]], steps: int) -> float:
    """The tokens of both texts of pairs for each token that finetuning.py computed; 1 for rows without pairs.

    Args:
        train: the events of its steps, whose counts say whether pairs shared their prompt.
    """
    if "num_pairs" not in train[0]:
        return 1.0
    with mock.patch.dict(os.environ, row.variables(steps)):
        pairs = getattr(random_rows, row.dataset_function)(None, range(1000), "train")  # any tokens: lengths count
    num_own = sum(len(pair["input_ids"]) for pair in pairs)
    # The last token of a prompt is before both answers.
    num_shared = sum(int(np.argmax(pair["labels"] != -100)) - 1 for pair in pairs)
    per_pair = sum(event["num_tokens"] for event in train) / sum(event["num_pairs"] for event in train)
    were_shared = per_pair * len(pairs) < num_own - num_shared / 2
    return num_own / (num_own - num_shared) if were_shared else 1.0


def lines_to_run(rows: Sequence[str], peers: Sequence[str], variants: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Row and tool of each line of the table."""
    for row in rows:
        yield from ((row, f"finetuning.py {variant}".strip()) for variant in variants)
        yield from ((row, tool) for tool in peers if can_run(PEERS[tool], WORKLOADS[ROWS[row]]))


def measure(row: str, tool: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one line."""
    workload = WORKLOADS[ROWS[row]]
    if not (folder / workload.shape).exists():
        make_random_weights(folder / workload.shape, workload.shape)
    with CardSamples() as card:
        if tool in PEERS:
            found = run_peer(PEERS[tool], workload, options.steps, folder, options.peer_path, options.line_seconds)
        else:
            flags = tool.removeprefix("finetuning.py").split()
            name = "-".join([row, *flags]).replace("/", "_")
            found = ours(name, workload, flags, options.steps, folder, options.line_seconds)
    return found | card.figures


def table(lines: Sequence[tuple[str, str]], results: Mapping[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """The lines of the table, in Markdown. The ratio is to the fastest peer of the row."""
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|---" * len(HEADINGS) + "|"
    ceiling = results.get(("", CEILING), {}).get("tflops", math.nan)
    for row, tool in lines:
        found = results.get((row, tool), {"failed": "not run yet"})
        if "failed" in found:
            yield f"| {row} | {tool} | {found['failed']} |"
            continue
        of_row = {other: results[row, other] for where, other in lines if where == row and (row, other) in results}
        peers = [figures.get("tokens_per_second", 0.0) for other, figures in of_row.items() if other in PEERS]
        fastest = max(peers, default=0.0) or math.nan
        per_token, speed = teraflops_per_token(of_row.values()), found["tokens_per_second"]
        first = next((figures for other, figures in of_row.items() if other not in PEERS), {})
        apart = [abs(a - b) for a, b in zip(found.get("losses", []), first.get("losses", []), strict=False)]
        yield (
            f"| {row} | {tool} | {speed:,.0f} | {speed / fastest:.3f} | {per_token * speed:.0f} "
            f"| {per_token * speed / ceiling:.2f} | {found['peak_gib']:.1f} | {found['first_loss']:.3f} "
            f"| {max(apart, default=math.nan):.4f} | {found.get('sm_mhz', math.nan):.0f} "
            f"| {found.get('watts', math.nan):.0f} | {found.get('settings', '')} |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), required=True)
    parser.add_argument("--results", type=Path, required=True, help="file of the results, which is gone on with")
    parser.add_argument("--ours", action="append", help="flags of finetuning.py, for one more line of it (--ours=...)")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS))
    parser.add_argument("--peer_path", help="folder with a folder of packages for each peer")
    parser.add_argument("--model_path", type=Path, help="keep models and runs here; a temporary folder by default")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--line_seconds", type=float, help="end a run after so long")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so long")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[tuple[str, str], dict[str, Any]] = {}
    if options.results.exists():
        kept = [json.loads(line) for line in options.results.read_text().splitlines()]
        results = {(line.pop("row"), line.pop("tool")): line for line in kept}

    def keep(row: str, tool: str, found: dict[str, Any]) -> None:
        results[row, tool] = found
        print(f"{row} {tool}: {json.dumps(found)}", flush=True)
        if "failed" in found:  # the next call tries again
            return
        with options.results.open("a") as file:
            file.write(json.dumps({"row": row, "tool": tool} | found) + "\n")

    keep("", CEILING, {"tflops": matrix_product_tflops()})
    lines = list(lines_to_run(options.rows, options.peers, options.ours or [""]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model_path or Path(temporary)
        for row, tool in lines:
            if (row, tool) not in results and time.monotonic() < deadline:
                keep(row, tool, measure(row, tool, options, folder))
    print(f"\n{CEILING}: {results['', CEILING]['tflops']:.0f} TFLOP/s\n", *table(lines, results), sep="\n")
    return 0 if all("failed" not in results.get(line, {"failed": ""}) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
