"""What works together: short trainings over every pair of settings, on one and on two devices, as one table.

    python -m benchmarks.gpu_matrix --results matrix.jsonl --minutes 9          on one GPU, shared by two ranks, or more
    python -m benchmarks.gpu_matrix --results matrix.jsonl --device cpu

Each row trains six steps on the shipped dialogues (benchmarks/matrix/rows.py). Its losses are compared with those of
the plain run of the same data and weights on one device. A row is right if it finishes near enough, or is refused in
one line; a recompilation is a frame that was compiled after the first step. A call begins no row after --minutes; the
next one goes on. It prints the table of all rows there are. The exit status is 1 while a row is missing or wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file, save_file

from benchmarks.matrix.rows import NUM_STEPS, RESUMED_AFTER, MatrixRow, matrix, model_name
from benchmarks.matrix.run_workers import RankEnd, RunWorkers
from benchmarks.runs.measurements import read_events
from tools.make_tiny_model import make_tiny_model
from utils.optional_packages import import_bitsandbytes
from utils.units import GIB


class MatrixDevice(NamedTuple):
    """What rows run on, and how long one may take, compiling included."""

    model: Mapping[str, Any]  # its sizes, for tools.make_tiny_model
    length: int  # of a row of the batch, in tokens
    limit_seconds: int
    compiles_slowly: bool = False
    variables: Mapping[str, str] = {}  # of the environment of what runs on it


DEVICES = {
    # the shape of a crash that two H200s saw: compiled QLoRA on packed dialogues
    "cuda": MatrixDevice(
        {"vocab_size": 2048, "hidden_size": 2048, "intermediate_size": 5632, "num_layers": 6}
        | {"num_heads": 32, "num_key_value_heads": 4, "initializer_range": 0.02, "tie_word_embeddings": False},
        length=512,
        limit_seconds=240,
    ),
    "cpu": MatrixDevice(
        {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
        | {"num_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
        length=128,
        limit_seconds=900,
        compiles_slowly=True,
        variables={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    ),
}


class Matrix:
    """Runs rows and keeps their results in a file, one JSON line for each."""

    def __init__(self, device: MatrixDevice, results: Path, folder: Path) -> None:
        self.device, self.path, self.folder = device, results, folder
        self.results: dict[str, dict[str, Any]] = {}
        if results.exists():
            lines = results.read_text().splitlines()
            self.results = {result["row"]: result for result in map(json.loads, lines)}
        self._keeping = threading.Lock()

    def complete(self, rows: Sequence[MatrixRow], deadline: float, num_lanes: int = 1) -> None:
        """Run what has no result yet, references first, as far as the time goes, in so many lanes at once."""
        references = dict.fromkeys(row.reference for row in rows)
        plain = self.folder / model_name("")
        make_tiny_model(plain, **self.device.model)
        for packing in {row.packing for row in rows} - {""}:
            unpack_weights(plain, self.folder / model_name(packing), packing)
        for num_ranks in (1, 2):
            of_size = [row for row in dict.fromkeys([*references, *rows]) if row.num_ranks == num_ranks]
            left = deque(row for row in of_size if row.name not in self.results)
            with ThreadPoolExecutor(num_lanes) as executor:
                lanes = [Lane(self.device, self.folder / f"lane-{lane}", num_ranks) for lane in range(num_lanes)]
                for ended in [executor.submit(self._run_in, lane, left, deadline) for lane in lanes]:
                    ended.result()

    def _run_in(self, lane: Lane, left: deque[MatrixRow], deadline: float) -> None:
        try:
            while time.monotonic() <= deadline:
                try:
                    row = left.popleft()
                except IndexError:
                    return
                self._keep(lane.run(row))
        finally:
            lane.workers.close()

    def _keep(self, result: dict[str, Any]) -> None:
        with self._keeping:
            self.results[result["row"]] = result
            with self.path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{result['row']}: {result['ended']} in {result['seconds']:.1f} s {result['line']}", flush=True)


class Lane:
    """Runs rows of so many ranks, one after the other, in a folder next to that of their model."""

    def __init__(self, device: MatrixDevice, folder: Path, num_ranks: int) -> None:
        folder.mkdir(exist_ok=True)
        self.device, self.folder = device, folder
        num_gpus = 0 if "CUDA_VISIBLE_DEVICES" in device.variables else torch.cuda.device_count()
        self.workers = RunWorkers(num_ranks, folder, device.variables, num_gpus)

    def run(self, row: MatrixRow) -> dict[str, Any]:
        """Train the row, in two sessions if it is to be resumed."""
        model, output = self.folder.parent / row.model, self.folder / "run"
        flags, started = row.flags(model, output, self.device.length), time.monotonic()
        sessions = [flags]
        if row["resumed"] == "yes":
            place = flags.index("--max_train_step") + 1
            sessions = [[*flags[:place], str(RESUMED_AFTER), *flags[place + 1 :]], [*flags, "--resume", "auto"]]
        ends: list[RankEnd] = []
        for session in sessions:
            ends = self.workers.run(session, self.device.limit_seconds)
            if any(end.status for end in ends):
                break
        events = read_events(output)
        shutil.rmtree(output, ignore_errors=True)
        return {"row": row.name, "seconds": time.monotonic() - started, **outcome(ends, events)}


def unpack_weights(model: Path, target: Path, packing: str) -> None:
    """Copy a model's folder, with weights of linear layers as they are when they were packed in nf4 or int8."""
    functional = import_bitsandbytes("--quantization").functional
    shutil.copytree(model, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        if packing == "nf4":
            packed, state = functional.quantize_4bit(tensor, compress_statistics=True, quant_type="nf4", blocksize=64)
            unpacked = functional.dequantize_4bit(packed, state)
        else:
            largest = tensor.half().float().abs().amax(dim=1, keepdim=True)
            unpacked = (tensor.half().float() * (127 / largest)).round() * (largest / 127)
        tensors[name] = unpacked.view_as(tensor).to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def outcome(ends: Sequence[RankEnd], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How a row ended, and its figures.

    Args:
        events: of its metrics.jsonl, of all its sessions.
    """
    statuses = [end.status for end in ends]
    printed = "\n".join(end.text for end in ends)
    errors = re.findall(r"^error: (.*)", printed, re.MULTILINE)
    has_trace = "Traceback" in printed
    # A rank that had not found it yet is ended by the launcher.
    if {2} <= set(statuses) <= {2, -signal.SIGTERM} and len(errors) == 1 and not has_trace:
        return {"ended": "refused", "line": errors[0]}
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "train"}
    if any(statuses) or has_trace or len(losses) != NUM_STEPS:
        said = errors[-1] if errors else printed.strip().rpartition("\n")[2]
        return {"ended": "failed", "line": f"exit statuses {statuses}, {len(errors)} error lines: {said[:300]}"}
    steps = [end.figures["steps"] for end in ends]
    peaks = [end.figures["peak_bytes"] for end in ends]
    return {
        "ended": "finished",
        "line": "",
        "losses": [losses[step] for step in sorted(losses)],
        "eval_loss": next((event["loss"] for event in reversed(events) if event["event"] == "eval"), None),
        "recompiled": max(sum(compiled for compiled, *_ in of_rank[1:]) for of_rank in steps),
        "peak_gib": None if None in peaks else max(peaks) / GIB,
        "held_gib": max(
            event["params_gib"] + event["grads_gib"] + event["optimizer_gib"]
            for event in events
            if event["event"] == "memory"
        ),
    }


def loss_apart(result: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The largest difference of a step's or the evaluation's loss, as a share of the reference's."""
    pairs = list(zip(result["losses"], reference["losses"], strict=True))
    if result["eval_loss"] is not None:
        pairs.append((result["eval_loss"], reference["eval_loss"]))
    return max(abs(ours - plain) / abs(plain) for ours, plain in pairs)


def verdict(row: MatrixRow, results: Mapping[str, Mapping[str, Any]]) -> tuple[str, float]:
    """ "right", "refused", "wrong", "failed" or "not run yet"; and how far its losses are from its reference's."""
    result, reference = results.get(row.name), results.get(row.reference.name)
    if result is None or (reference is None and result["ended"] == "finished"):
        return "not run yet", math.nan
    if result["ended"] != "finished":
        return result["ended"], math.nan
    assert reference is not None
    if reference["ended"] != "finished":
        return "no reference", math.nan
    apart = loss_apart(result, reference)
    return ("right" if apart <= row.bound else "wrong"), apart


def table(rows: Sequence[MatrixRow], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The lines of the table, in Markdown."""
    columns = ("layout", "trained", "rows", "precision", "optimizer", "checkpointing")
    headings = [*columns, "also", "ended", "loss apart", "recompiled"]
    has_peaks = any(result.get("peak_gib") is not None for result in results.values())
    headings += ["peak GiB"] * has_peaks  # a CPU has no allocator that knows it
    yield "| " + " | ".join(headings) + " |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        also = ["compiled"] * (row["compiled"] == "yes") + ["accumulation"] * (row["accumulation"] == "2")
        also += [name for name in ("clipping", "evaluation", "resumed") if row[name] == "yes"]
        ended, apart = verdict(row, results)
        result = results.get(row.name, {})
        figures = [f"{ended}: {result['line']}" if result.get("line") else ended]
        if result.get("ended") == "finished":
            figures += [f"{apart:.1e}", str(result["recompiled"])]
            figures += [f"{result['peak_gib']:.2f}"] if has_peaks else []
        cells = [*(row[column] for column in columns), ", ".join(also), *figures]
        yield "| " + " | ".join([*cells, *[""] * (len(headings) - len(cells))]).replace("\n", " ") + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file of the results, which is gone on with")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after so long")
    parser.add_argument("--device", choices=sorted(DEVICES), default="cuda")
    parser.add_argument("--lanes", type=int, default=1, help="rows that run at once, on the same GPUs")
    parser.add_argument("--rows", nargs="+", help="parts of names, such as 'nf4 packed'; unset: all rows")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    device = DEVICES[options.device]
    wanted = options.rows or [""]
    rows = [row for row in matrix(compiles_slowly=device.compiles_slowly) if any(part in row.name for part in wanted)]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; give --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        state = Matrix(device, options.results, Path(folder))
        state.complete(rows, deadline, options.lanes)
    print("", *table(rows, state.results), sep="\n")
    ends = Counter(verdict(row, state.results)[0] for row in rows)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {psutil.cpu_count()} cores"
    print(f"\n{where}, torch {torch.__version__}: {', '.join(f'{count} {end}' for end, count in ends.items())}")
    return 0 if ends["right"] + ends["refused"] == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
