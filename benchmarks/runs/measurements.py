"""What several benchmarks read: the events of a run, and the memory of a process."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
WARMUP_STEPS = 5


def read_events(run_folder: Path) -> list[dict[str, Any]]:
    """The events in metrics.jsonl, without a last line that a killed run left incomplete; empty if there is no file."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_events(run_folder: Path) -> list[dict[str, Any]]:
    """The events of training steps."""
    return [event for event in read_events(run_folder) if event["event"] == "train"]


def speed_figures(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians per device over the steps after warm-up, the run's peak and first loss, and retries of its allocator.

    Memory is recorded in a few steps alone, so later retries are not counted.
    """
    train = [event for event in events if event["event"] == "train"]
    steady = train[WARMUP_STEPS:]
    return {
        "tokens_per_second": statistics.median(event["tokens_per_second_per_device"] for event in steady),
        "tflops": statistics.median(event["model_tflops_per_device"] for event in steady),
        "peak_gib": events[-1]["peak_allocated_gib"] or math.nan,
        "first_loss": train[0]["loss"],
        "num_alloc_retries": max(
            (event["num_alloc_retries"] for event in events if event["event"] == "memory"), default=0
        ),
    }


def teraflops_per_token(figures: Iterable[Mapping[str, Any]]) -> float:
    """Of tools that train the same rows: a formula counts the FLOPs of a token, whoever computes them. Else nan."""
    return next((of["tflops"] / of["tokens_per_second"] for of in figures if "tflops" in of), math.nan)


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process, without pages of files; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
