"""Planned and measured peak memory of real runs of finetuning.py, side by side: 24 on GPUs, or 20 on a CPU.

    python -m benchmarks.planned_memory --folder kept
    python -m benchmarks.planned_memory --folder kept --cpu

On GPUs the shapes of 1.1B and 8B weights, at random; on a CPU those of 135M at most, with shared key heads or not, rows
of 64 to 4,096 tokens, all weights or LoRA, and encoder-decoders. The shipped dialogues, packed and padded. Each run
writes its plan and what was measured into plan.json. Run folders are kept, and those that have finished are read
instead of run again: a call ends after --seconds, and the next goes on. It prints one table of all that is there. On a
CPU, which has no allocator that knows the peak, the resident memory of the whole process is compared.

docs/planning.md has what was measured. The rows of four ranks ran on one GPU or two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs.launch import ROOT, UNCOMPILED, launch
from benchmarks.runs.measurements import read_events
from benchmarks.runs.shapes import SEQ2SEQ, SHAPES, make_shape
from planning.against_run import resident_gib

SAMPLES = ROOT / "datasets/samples/dialogue_summary"
NUM_STEPS = 3
CLOSE, NEAR = 0.05, 0.10  # of the measured peak
CLOSE_ON_CPU, NEAR_ON_CPU = 0.10, 0.15  # a process's heap is not as exact as a GPU's allocator
LORA = "--use_peft"
QLORA = "--use_peft --quantization 4bit"
OFF, SELECTIVE, FULL = (f"--activation_checkpointing {mode}" for mode in ("off", "selective", "full"))
PADDED = "--batching_strategy padding"
ZERO2 = "--enable_fsdp --sharding_strategy SHARD_GRAD_OP"


@dataclass(frozen=True)
class PlannedCase:
    """A run: the shape of its model, its ranks and its flags."""

    shape: str
    nproc: int
    flags: str
    size: str = ""  # of its rows, as flags; by default that of --length and --batch


MANY = 4  # GPUs of the rows with several; --nproc gives another number
_1B = [
    OFF,
    f"{OFF} --mixed_precision False",
    f"{OFF} --pure_bf16",
    f"{OFF} --pure_bf16 --optimizer SGD",
    f"{OFF} --optimizer AdamW8bit",
    SELECTIVE,
    FULL,
    f"{OFF} {PADDED}",
    f"{LORA} {OFF}",
    f"{LORA} {FULL} {PADDED}",
    f"{QLORA} {FULL}",
    f"{QLORA} {OFF} {PADDED}",
]
_8B = [
    f"{LORA} {FULL}",
    f"{LORA} {SELECTIVE}",
    f"{QLORA} {FULL}",
    f"{QLORA} {OFF} {PADDED}",
    f"{FULL} --pure_bf16 --optimizer SGD",
    f"{FULL} --pure_bf16 --optimizer AdamW8bit",
]
CASES = [
    *(PlannedCase("tinyllama", 1, flags) for flags in _1B),
    *(PlannedCase("llama8b", 1, flags) for flags in _8B),
    PlannedCase("tinyllama", MANY, f"--enable_fsdp --sharding_strategy NO_SHARD {OFF}"),
    PlannedCase("tinyllama", MANY, f"{ZERO2} {OFF} {PADDED}"),
    PlannedCase("llama8b", MANY, f"--enable_fsdp {FULL}"),
    PlannedCase("llama8b", MANY, f"{ZERO2} {SELECTIVE} --pure_bf16"),
    PlannedCase("llama8b", MANY, f"--enable_fsdp {LORA} {OFF} {PADDED}"),
    PlannedCase("llama8b", MANY, f"--enable_fsdp {QLORA} {FULL}"),
]

ROWS_ON_CPU = ((64, 4), (256, 2), (1024, 1), (4096, 1))  # tokens, and rows
CPU_CASES = [
    *(
        PlannedCase(shape, 1, method, f"--context_length {length} --batch_size_training {rows}")
        for shape in ("smollm2-12layers", "smollm2-12layers-all-heads")
        for method in ("", LORA)
        for length, rows in ROWS_ON_CPU
    ),
    *(
        PlannedCase(shape, 1, method, f"--max_source_length {length} --batch_size_training 4")
        for shape in SEQ2SEQ
        for method, length in (("", 256), (LORA, 512))
    ),
]

Run = Callable[[Sequence[str], int, float], str]
"""Runs finetuning.py with flags on so many ranks, for so many seconds at most; the end of its output if it failed."""


def run_command(flags: Sequence[str], nproc: int, seconds: float) -> str:
    """Run the command line; with fewer GPUs than ranks, several share each (`benchmarks.runs.launch.num_parts_of`).

    Raises:
        subprocess.TimeoutExpired: if the time was too short; the run has ended then.
    """
    return launch(flags, nproc, by_torchrun="--enable_fsdp" in flags, limit_seconds=seconds)


def flags_of(case: PlannedCase, model: Path, output: Path, options: argparse.Namespace) -> list[str]:
    flags = ["--model_name", str(model), "--random_weights", "--output_dir", str(output), "--overwrite"]
    flags += ["--samsum_dataset.data_path", str(SAMPLES), "--max_train_step", str(NUM_STEPS), "--save_model", "False"]
    size = case.size or f"--context_length {options.length} --batch_size_training {options.batch}"
    flags += ["--save_every_steps", "0", "--save_every_minutes", "0", "--run_validation", "False"]
    flags += UNCOMPILED
    return [*flags, *size.split(), *case.flags.split()]


def figures_of(output: Path) -> dict[str, Any] | None:
    """The plan of a run that has finished, with what was measured; else None."""
    events = read_events(output)
    if not events or events[-1].get("status") != "finished":
        return None
    plan: dict[str, Any] = json.loads((output / "plan.json").read_text())
    return plan


def run_all(cases: Mapping[int, PlannedCase], folder: Path, options: argparse.Namespace, run: Run) -> None:
    """Run what has not finished yet, as far as the time goes."""
    deadline = time.monotonic() + options.seconds
    for number, case in cases.items():
        model, output = folder / case.shape, folder / f"run-{number:02}"
        if figures_of(output) is not None:
            continue
        if (seconds_left := deadline - time.monotonic()) <= 0:
            return
        if not model.exists():
            make_shape(model, case.shape)
        flags = flags_of(case, model, output, options)
        print(f"{number:02} on {case.nproc}: $ finetuning.py {shlex.join(flags)}", flush=True)
        try:
            failure = run(flags, case.nproc, seconds_left)
        except subprocess.TimeoutExpired:
            print(f"{number:02}: no time left; the next call begins it again")
            return
        if failure:
            print(f"{number:02}: {failure}", flush=True)


def rows_of(cases: Mapping[int, PlannedCase], folder: Path) -> Iterator[dict[str, str]]:
    """The table, as far as runs have finished."""
    for number, case in cases.items():
        plan = figures_of(folder / f"run-{number:02}")
        flags = f"{case.size} {case.flags}".strip()
        row = {"run": f"{number:02}", "shape": case.shape, "ranks": str(case.nproc), "flags": flags}
        if plan is None:
            yield row | {"compared": "not run yet"}
            continue
        compared = comparison(plan)
        off = difference(compared)
        yield row | {
            "compared": ", ".join(compared),
            "planned GiB": f"{sum(planned for planned, _ in compared.values()):.4g}",
            "measured GiB": f"{sum(measured for _, measured in compared.values()):.4g}",
            "difference": f"{100 * off:+.1f} %",
        }


def comparison(plan: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What can be compared, planned and measured: the peak, or on a CPU the resident memory."""
    measured = plan["measured"]
    if measured["peak_gib"] is None:
        return {"resident": (resident_gib(plan), measured["resident_gib"])}
    return {"peak": (plan["peak_gib"], measured["peak_gib"])}


def difference(compared: dict[str, tuple[float, float]]) -> float:
    """The largest difference, as a share of all that was measured."""
    total = sum(measured for _, measured in compared.values())
    return max(((planned - measured) / total for planned, measured in compared.values()), key=abs)


def main(argv: Sequence[str] | None = None, run: Run = run_command) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for run folders, which are kept")
    parser.add_argument("--seconds", type=float, default=560, help="begin nothing after so long, and end what runs")
    parser.add_argument("--cpu", action="store_true", help="the runs for a CPU")
    parser.add_argument("--rows", type=int, nargs="+", help="their numbers; unset: all")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of all rows, instead of their own")
    parser.add_argument("--nproc", type=int, default=MANY, help="ranks of the rows with several")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args(argv)
    cases = {
        number: replace(case, shape=options.shape or case.shape, nproc=options.nproc if case.nproc > 1 else 1)
        for number, case in enumerate(CPU_CASES if options.cpu else CASES, 1)
        if options.rows is None or number in options.rows
    }
    folder: Path = options.folder.absolute()
    run_all(cases, folder, options, run)
    table = list(rows_of(cases, folder))
    headings = list(dict.fromkeys(name for row in table for name in row))
    print("\n| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
    for row in table:
        print("| " + " | ".join(row.get(heading, "") for heading in headings) + " |")
    offs = [abs(float(row["difference"].split()[0])) / 100 for row in table if "difference" in row]
    limits = (CLOSE, NEAR) if torch.cuda.is_available() else (CLOSE_ON_CPU, NEAR_ON_CPU)
    close, near = (sum(off <= limit for off in offs) for limit in limits)
    print(f"\n{len(offs)} of {len(cases)} run; {close} within {limits[0]:.0%}, {near} within {limits[1]:.0%}")
    return 0 if near == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
