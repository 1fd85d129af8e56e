"""The curves that a report draws: columns of numbers by run, thinned out for long runs."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from reporting.events import Event
from reporting.memory_phases import PHASES
from reporting.report.run_files import RunFiles
from reporting.report.thinning import kept_points, rounded, trailing_means

MOST_TRAIN_POINTS = 12_000
"""Drawn steps of all runs together. With MOST_MEMORY_VALUES it keeps a page of ten runs below 2 MiB."""
MOST_POINTS_OF_A_RUN = 4_000
MOST_EVALS = 500  # of a run
MOST_MEMORY_VALUES = 60_000
MOST_RANKS = 16  # whose memory is shown

TRAIN_COLUMNS = ("loss", "grad_norm", "lr", "tokens_per_second", "model_tflops_per_device", "wait_percent")
NOISY_COLUMNS = ("loss", "grad_norm", "tokens_per_second", "model_tflops_per_device", "wait_percent")
FEWEST_AVERAGED = 150
"""Runs of fewer steps are drawn without a mean; it is taken over a fiftieth of the run."""
EVAL_COLUMNS = ("loss", "rouge1", "rouge2", "rougeL")
PARTS = ("params", "grads", "optimizer", "activations", "other")
MEMORY_COLUMNS = (*PARTS, "allocated", "peak_allocated")


class _Axes:
    """The place of a step on the other axes: tokens and seconds of training so far."""

    def __init__(self, run: RunFiles) -> None:
        self.steps = [event["step"] for event in run.train]
        self.tokens = [0, *accumulate(event.get("num_tokens") or 0 for event in run.train)]
        self.seconds = [0.0, *accumulate(event.get("step_seconds") or 0.0 for event in run.train)]

    def columns(self, events: list[Event]) -> dict[str, list[Any]]:
        places = [bisect_right(self.steps, event["step"]) for event in events]
        return {
            "step": [event["step"] for event in events],
            "tokens": [self.tokens[place] for place in places],
            "seconds": [rounded(self.seconds[place], 7) for place in places],
        }


def curves_of(run: RunFiles, *, num_runs: int) -> dict[str, Any]:
    """Train, evaluation and memory curves of one of `num_runs` runs, and how many steps there were."""
    axes = _Axes(run)
    return {
        "train": _train(run, axes, min(MOST_POINTS_OF_A_RUN, MOST_TRAIN_POINTS // num_runs)),
        "eval": _evals(run, axes),
        "memory": _memory(run, axes, MOST_MEMORY_VALUES // num_runs),
        "resumed_after": [s.first_step - 1 for s in run.sessions[1:] if s.first_step is not None],
        "num_steps": len(run.train),
        "averaged_steps": averaged_steps(run),
    }


def total_tokens(run: RunFiles) -> int:
    return sum(event.get("num_tokens") or 0 for event in run.train)


def wait_percent(event: Event) -> float | None:
    """The percentage of a step that was spent waiting for its data."""
    wait, seconds = event.get("data_wait_seconds"), event.get("step_seconds")
    return None if wait is None or not seconds else 100 * wait / seconds


def _train(run: RunFiles, axes: _Axes, most: int) -> dict[str, list[Any]]:
    columns = {name: [event.get(name) for event in run.train] for name in TRAIN_COLUMNS}
    columns["wait_percent"] = [wait_percent(event) for event in run.train]
    kept = kept_points(list(columns.values()), most)
    # Means are of all steps, and are thinned afterwards.
    if span := averaged_steps(run):
        columns |= {f"{name}_mean": trailing_means(columns[name], span) for name in NOISY_COLUMNS}
    thinned = {name: [rounded(column[point]) for point in kept] for name, column in columns.items()}
    return axes.columns([run.train[point] for point in kept]) | thinned


def averaged_steps(run: RunFiles) -> int:
    """The number of steps in a mean; 0 if the run is too short for one."""
    return len(run.train) // 50 if len(run.train) >= FEWEST_AVERAGED else 0


def _evals(run: RunFiles, axes: _Axes) -> dict[str, list[Any]]:
    columns = {name: [event.get(name) for event in run.evals] for name in EVAL_COLUMNS}
    kept = kept_points(list(columns.values()), MOST_EVALS)
    thinned = {name: [rounded(column[point]) for point in kept] for name, column in columns.items()}
    return axes.columns([run.evals[point] for point in kept]) | thinned


def _memory(run: RunFiles, axes: _Axes, most_values: int) -> dict[str, Any]:
    """One value for each observed step, by column, phase and rank."""
    by_place = {(event["step"], event["rank"], event["phase"]): event for event in run.memory}
    ranks = shown_ranks(run)
    steps = sorted({event["step"] for event in run.memory})
    highest = dict.fromkeys(steps, 0.0)
    for event in run.memory:
        highest[event["step"]] = max(highest[event["step"]], event.get("allocated_gib") or 0.0)
    per_step = len(MEMORY_COLUMNS) * len(PHASES) * max(1, len(ranks))
    kept = kept_points([list(highest.values())], max(4, most_values // per_step))
    steps = [steps[point] for point in kept]

    def value(step: int, rank: int, phase: str, column: str) -> float | int | None:
        return rounded(by_place.get((step, rank, phase), {}).get(f"{column}_gib"), 4)

    return axes.columns([{"step": step} for step in steps]) | {
        "ranks": ranks,
        "values": {
            column: [[[value(step, rank, phase, column) for step in steps] for rank in ranks] for phase in PHASES]
            for column in MEMORY_COLUMNS
        },
    }


def shown_ranks(run: RunFiles) -> list[int]:
    """The ranks of the memory charts: the fullest, the emptiest, then by number, up to MOST_RANKS."""
    peaks = {rank: own.get("peak_allocated_gib") or 0.0 for rank, own in run.peaks.items()}
    if not peaks:
        return []
    fullest, emptiest = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
    return list(dict.fromkeys([fullest, emptiest, *peaks]))[:MOST_RANKS]
