"""How long a row may be: TRL and finetuning.py on the same row, twice as long each time, until one card is too small.

    python -m benchmarks.longest_row --results longest.jsonl --peer_path FOLDER --minutes 9

QLoRA, r=16 on all linear layers, each tool with what it has for long rows: TRL its chunked loss (its default), Liger's
kernels, checkpointing and offloaded activations; finetuning.py the same and tiles. A tool that has failed at a length
runs no longer ones, and a call begins nothing after --minutes. --shape llama8b-long has all 32 layers;
--gpu_memory_gib 79 lets a larger card be one of 80 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.calls import PEERS, run_peer
from benchmarks.runs.long_workloads import OFFLOADED, QLORA_IN_TILES
from benchmarks.runs.shapes import make_random_weights
from benchmarks.runs.workload import Workload
from benchmarks.training_speed import run

TRL, OURS = "TRL + Liger", "finetuning.py"


def ours(row: Workload, steps: int, folder: Path) -> dict[str, Any]:
    """The figures of a run of finetuning.py."""
    events = run(f"{row.shape}-{row.length}", row, steps, [], folder, None)
    train = [event for event in events if event["event"] == "train"]
    if not train:
        return {"failed": "see what it printed"}
    speed, peak = train[-1]["tokens_per_second_per_device"], events[-1]["peak_allocated_gib"]
    return {"tokens_per_second": speed, "peak_gib": peak or math.nan, "first_loss": train[0]["loss"]}


def line(tool: str, tokens: int, found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"| {tokens:,} | {tool} | {found['failed']} |"
    cells = [f"{found['tokens_per_second']:,.0f}", f"{found['peak_gib']:.1f}", f"{found['first_loss']:.3f}"]
    return f"| {tokens:,} | {tool} | " + " | ".join(cells) + " |"


def measure(tool: str, row: Workload, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if tool == OURS:
        return ours(row, options.steps, folder)
    return run_peer(PEERS[TRL], row, options.steps, folder, options.peer_path, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, which are gone on with")
    parser.add_argument("--shape", default="llama8b-8layers")
    parser.add_argument("--first", type=int, default=32768, help="tokens of the shortest row")
    parser.add_argument("--longest", type=int, default=2**20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--flags", help="flags of finetuning.py in the place of its own, in one string")
    parser.add_argument("--gpu_memory_gib", type=float, help="limit of the allocator, as if the GPU were smaller")
    parser.add_argument("--peer_path", help="folder with TRL and Liger in trl/")
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    flags = [*QLORA_IN_TILES, *OFFLOADED] if options.flags is None else options.flags.split()
    row = Workload(options.shape, 1, options.first, flags, gpu_memory_gib=options.gpu_memory_gib)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = {(found["tool"], found["tokens"]): found for found in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_random_weights(folder / options.shape, options.shape)
        print("| tokens | tool | tokens/s | peak GiB | first loss |\n" + "|---" * 5 + "|", flush=True)
        while row.length <= options.longest:
            for tool in (TRL, OURS):
                fits = all("failed" not in found for (other, _), found in results.items() if other == tool)
                if fits and (tool, row.length) not in results and time.monotonic() < deadline:
                    found = {"tool": tool, "tokens": row.length, **measure(tool, row, options, folder)}
                    results[tool, row.length] = found
                    with options.results.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                if (tool, row.length) in results:
                    print(line(tool, row.length, results[tool, row.length]), flush=True)
            row = replace(row, length=2 * row.length)


if __name__ == "__main__":
    main()
