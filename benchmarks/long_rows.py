"""Peak memory and seconds of steps of one long row, a line of a CSV each, beside the plan of each.

    python -m benchmarks.long_rows --plan                                            planned, on any machine
    python -m benchmarks.long_rows --results rows.csv --rows cheap --minutes 4       measured, on one GPU
    python -m benchmarks.long_rows --results rows.csv --rows llama8b-8layers-shared-131072-{1,2}

Rows are those of benchmarks/runs/long_workloads.py. Those that the file holds are not run again, and a call begins none
after --minutes. Rows of one process run in the same process, one after the other; those of several ranks start, and
import, while the row before computes. A row that does not end within --limit seconds is killed, and the steps that it
made count. tests/planning/long_rows.csv has the file's form: append its lines there.

`ended` says how a row ended that did not make all of its steps: "killed", "out of memory" or "failed". One that ran
out of memory, or was killed before its first step ended, has a line of 0 steps with its fullest moment so far, and is
not run again either, unless its line is removed. So the peak of a step that is too long for one call, which is in the
first layers of backward, takes a --limit of what forward takes (a quarter of the planned step) and some more. Of a row
that did not finish, the seconds that it ran are printed.

--allocator expandable lets the allocator's segments grow (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.matrix.run_workers import RankEnd, RunWorkers
from benchmarks.runs.launch import ROOT
from benchmarks.runs.long_workloads import CHEAP_LONG_ROWS, LONG_ROWS
from benchmarks.runs.measurements import read_events
from benchmarks.runs.shapes import make_shape
from benchmarks.runs.workload import Workload
from run_folder.entries import OOM, PLAN
from utils.memory_errors import what_ran_out

ALLOCATORS = {"": {}, "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
HOST_GIB_PER_GPU = 128
"""Of the machines that the rows are planned for."""
COLUMNS = ["row", "allocator", "shape", "gpus", "sharing", "tokens", "flags", "steps"]
COLUMNS += ["peak_gib", "reserved_gib", "host_gib", "first_seconds", "seconds", "date", "ended"]


def described(name: str, row: Workload, allocator: str) -> dict[str, Any]:
    """The columns of a row that say what is run."""
    sizes = {"shape": row.shape, "gpus": row.nproc, "sharing": row.num_sharing, "tokens": row.length}
    return {"row": name, "allocator": allocator, **sizes, "flags": " ".join(row.flags)}


def measured(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The columns that are measured, of the fullest rank; None if no step was made.

    Args:
        events: of metrics.jsonl. Without the last one, of a run that was killed, the peak is that of the steps' ends.
    """
    train = [event for event in events if event["event"] == "train"]
    memory = [event for event in events if event["event"] == "memory"]
    if not train or not memory:
        return None
    peaks = [event.get("peak_allocated_gib") for event in events if event["event"] in ("memory", "end")]
    return {
        "steps": len(train),
        "peak_gib": round(max(peak or 0.0 for peak in peaks), 3),
        "reserved_gib": round(max(event["reserved_gib"] or 0.0 for event in memory), 3),
        "host_gib": round(max(event["host_rss_gib"] for event in memory), 1),
        "first_seconds": round(train[0]["step_seconds"], 2),
        "seconds": round(train[-1]["step_seconds"], 2) if len(train) > 1 else "",
    }


def without_a_step(ended: str, ends: Sequence[RankEnd]) -> dict[str, Any] | None:
    """The columns that are measured of a row that ended before its first step did; None if there is nothing to tell."""
    found = [end.peaks for end in ends if end.peaks]
    if ended not in ("killed", "out of memory") or not found:
        return None
    most = {name: max(peaks[name] for peaks in found) for name in ("peak_gib", "reserved_gib", "host_gib")}
    return {"steps": 0, **most, "first_seconds": "", "seconds": ""}


def how_ended(ends: Sequence[RankEnd], run_folder: Path) -> str:
    """Nothing if all ranks finished. A run whose memory ran out leaves its account in its folder, once it has one."""
    failed = [end for end in ends if end.status]
    if failed and ((run_folder / OOM).exists() or any(what_ran_out(RuntimeError(end.text)) for end in failed)):
        return "out of memory"
    return ("killed" if any(end.status == -signal.SIGKILL for end in failed) else "failed") if failed else ""


def beside_plan(values: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """One line: what was measured, and by how much it differs from the run's plan."""
    parts = [f"{values['steps']} steps"]
    for column, planned, unit in (("peak_gib", "peak_gib", "GiB"), ("seconds", "seconds_per_step", "s")):
        found, of_plan = values[column] or math.nan, plan.get(planned) or math.nan
        parts.append(f"{found:.2f} {unit}, {of_plan:.2f} planned ({100 * (of_plan / found - 1):+.1f} %)")
    parts += [f"{values['reserved_gib']:.2f} GiB reserved", f"{values['host_gib']:.1f} of the host"]
    return "; ".join([*parts, *([f"first step {values['first_seconds']:.1f} s"] if values["steps"] else [])])


@dataclass
class LongRows:
    """Runs rows, and keeps a line of each in a file."""

    workloads: Mapping[str, Workload]
    results: Path
    folder: Path  # for models and runs
    allocator: str
    steps: int
    limit_seconds: float
    _started: list[RunWorkers] = field(default_factory=list)

    def left(self, names: Sequence[str]) -> list[str]:
        """The rows that the file does not hold."""
        found = {(line["row"], line["allocator"]) for line in read_lines(self.results)}
        return [name for name in names if (name, self.allocator) not in found]

    def run(self, names: Sequence[str], deadline: float) -> None:
        """Run the rows that are left, and begin none after the deadline. No process is left, however this ends."""
        ahead: dict[str, RunWorkers] = {}
        alone = self._workers(1)
        try:
            self._run_each(self.left(names), deadline, alone, ahead)
        finally:
            for workers in self._started:
                workers.close()

    def _run_each(self, names: Sequence[str], deadline: float, alone: RunWorkers, ahead: dict[str, RunWorkers]) -> None:
        for place, name in enumerate(names):
            for next_name in names[place : place + 2]:  # its ranks import while this row computes
                if self._in_own_ranks(next_name) and next_name not in ahead:
                    ahead[next_name] = self._workers(self.workloads[next_name].nproc)
                    ahead[next_name].start()
            if time.monotonic() > deadline:
                print(f"{name}: not begun, the time is up", flush=True)
                continue
            self._run(name, ahead.pop(name, alone))

    def _in_own_ranks(self, name: str) -> bool:
        return self.workloads[name].nproc > 1 or "--enable_fsdp" in self.workloads[name].flags

    def _workers(self, num_ranks: int) -> RunWorkers:
        workers = RunWorkers(num_ranks, self.folder, ALLOCATORS[self.allocator], torch.cuda.device_count())
        self._started.append(workers)
        return workers

    def _run(self, name: str, workers: RunWorkers) -> None:
        row, output, started = self.workloads[name], self.folder / "run", time.monotonic()
        if not (self.folder / row.shape).exists():
            make_shape(self.folder / row.shape, row.shape)
        words = row.words(self.folder / row.shape, output, self.steps)
        variables = row.variables(self.steps)
        ends = workers.run(words, self.limit_seconds, variables, by_torchrun=self._in_own_ranks(name))
        seconds, ended = time.monotonic() - started, how_ended(ends, output)
        values = measured(read_events(output)) or without_a_step(ended, ends)
        if values is not None:
            when = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "ended": ended}
            append_line(self.results, {**described(name, row, self.allocator), **values, **when})
            print(f"{name}: {beside_plan(values, read_plan(output))} [{seconds:.0f} s]", flush=True)
        if any(end.status for end in ends):
            said = next(end.text for end in ends if end.status)[-1500:]
            after = max((end.peaks.get("seconds", 0.0) for end in ends), default=0.0)
            statuses = f"{[end.status for end in ends]} after {after:.0f} s of the run"
            print(f"{name}: {ended}, exit statuses {statuses} [{seconds:.0f} s]\n{said}", flush=True)
        shutil.rmtree(output, ignore_errors=True)


def read_lines(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV of this form; none if there is no file."""
    if not path.exists():
        return []
    with path.open() as table:
        return list(csv.DictReader(table))


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Add a line to a CSV of this form, which may have been begun with fewer columns."""
    is_new = not path.exists()
    columns = COLUMNS if is_new else path.read_text().partition("\n")[0].split(",")
    with path.open("a", newline="") as table:
        writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(values)


def read_plan(run_folder: Path) -> dict[str, Any]:
    path = run_folder / PLAN
    return json.loads(path.read_text()) if path.exists() else {}


def plan_words(row: Mapping[str, Any], model: Path, plan: Path, card: str = "H100-80GB") -> list[str]:
    """The command line that plans a line of the CSV into `plan`.

    Args:
        row: the columns of `described`.
    """
    words = ["--model_name", str(model), *str(row["flags"]).split(), "--batch_size_training", "1"]
    words += ["--context_length", str(row["tokens"]), "--context_parallel_size", str(row["sharing"])]
    words += [] if "--compile" in words else ["--compile"]
    words += ["--dry_run", "--dry_run_hardware", f"{row['gpus']}x{card}", "--dry_run_json", str(plan)]
    return words


def print_plans(names: Sequence[str], folder: Path) -> None:
    """A table of what is planned for each row on H100s, with 128 GiB of host memory for each, by dry runs."""
    headings = ["row", "GPUs", "peak GiB", "host GiB", "seconds per step", "fits"]
    print("| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|")
    for name in names:
        row, model, plan = LONG_ROWS[name], folder / LONG_ROWS[name].shape, folder / "plan.json"
        if not model.exists():
            make_shape(model, row.shape)
        plan.unlink(missing_ok=True)
        words = plan_words(described(name, row, ""), model, plan)
        words += ["--host_memory_gib", str(HOST_GIB_PER_GPU * row.nproc)]
        done = subprocess.run([sys.executable, "finetuning.py", *words], cwd=ROOT, capture_output=True, text=True)
        if not plan.exists():
            print(f"| {name} | {row.nproc} | {done.stderr.strip()[-300:]} |", flush=True)
            continue
        found = json.loads(plan.read_text())
        figures = [found["peak_gib"], found["host_gib"] * row.nproc, found["seconds_per_step"]]
        cells = [name, str(row.nproc), *(f"{figure:.1f}" for figure in figures), found["verdict"]]
        print("| " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["all", "cheap", *LONG_ROWS]
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", choices=names, default=names[:1], help="all, cheap, or names"
    )
    parser.add_argument("--plan", action="store_true", help="print what is planned, and run nothing")
    parser.add_argument("--results", type=Path, default=Path("long_rows.csv"), help="CSV, which is gone on with")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after so long")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a row is killed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), default="")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    # As Ctrl-C: a `timeout` around this command ends the row's processes, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    suites = {"all": [*LONG_ROWS], "cheap": [*CHEAP_LONG_ROWS]}
    names = list(dict.fromkeys(name for asked in options.rows for name in suites.get(asked, [asked])))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.plan:
            print_plans(names, folder)
        else:
            rows = LongRows(LONG_ROWS, options.results, folder, options.allocator, options.steps, options.limit)
            rows.run(names, deadline)


if __name__ == "__main__":
    main()
