"""The table and lines that a person sees at a run's end. Each line begins with its subject, for eyes and for grep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from reporting.log_line import clock
from reporting.run_yaml import read_run_yaml
from reporting.tables import value_range


def end_summary(events: Iterable[dict[str, Any]], folder: Path, *, device_type: str) -> list[Any]:
    """The results: what held the memory at each phase, losses, speed, time, and where the weights are.

    Args:
        events: all of the run's, as read from metrics.jsonl.
    """
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(event["event"], []).append(event)
    parts: list[Any] = []
    if memory := of.get("memory"):
        parts += [_memory_table(memory, device_type), _peaks(memory)]
    if train := of.get("train"):
        steady = sorted(event["tokens_per_second"] for event in train[len(train) // 4 :])
        parts.append(
            f"train loss {_loss(train[0])} -> {_loss(train[-1])} over {len(train)} steps, "
            f"median {steady[len(steady) // 2]:,.0f} tokens/s"
        )
    if evals := of.get("eval"):
        finite = [event for event in evals if event["loss"] is not None]
        best = min(finite, key=lambda event: event["loss"], default=evals[-1])
        parts.append(
            f"eval loss {_loss(evals[0])} (step {evals[0]['step']}) -> {_loss(evals[-1])} "
            f"(step {evals[-1]['step']}), best {_loss(best)} (step {best['step']})"
        )
    for end in of.get("end", []):
        in_steps = sum(event["step_seconds"] for event in of.get("train", []))
        parts.append(f"time {clock(end['seconds'])}, of it {clock(in_steps)} in training steps")
    saved = read_run_yaml(folder).get("saved")
    parts.append(f"weights {folder / saved['folder']} (of step {saved['step']})" if saved else "weights not saved")
    return parts


def _memory_table(memory: list[dict[str, Any]], device_type: str) -> Table:
    last = max(event["step"] for event in memory)
    num_ranks = len({event["rank"] for event in memory})
    of = "resident memory" if device_type == "cpu" else "allocated memory"
    table = Table(title=f"{of} at step {last}, GiB, the fullest of {num_ranks} rank(s)", title_justify="left")
    columns = ("params", "grads", "optimizer", "activations", "other", "allocated", "peak_allocated")
    for heading in ("phase", *columns):
        table.add_column(heading.replace("_allocated", ""), justify="left" if heading == "phase" else "right")
    for phase in dict.fromkeys(event["phase"] for event in memory):
        of_phase = [e for e in memory if e["step"] == last and e["phase"] == phase]
        fullest = max(of_phase, key=lambda event: event["allocated_gib"])
        table.add_row(phase, *(f"{fullest[f'{name}_gib']:.3f}" for name in columns))
    return table


def _peaks(memory: list[dict[str, Any]]) -> str:
    peaks: dict[int, float] = {}
    for event in memory:
        peaks[event["rank"]] = max(event["peak_allocated_gib"], peaks.get(event["rank"], 0.0))
    return f"peak memory {value_range(peaks.values(), '.3f')} GiB over {len(peaks)} rank(s)"


def _loss(event: dict[str, Any]) -> str:
    return "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
