"""What a run came to: the figures of its `end` event, and the table and lines that a person sees.

Each line begins with its subject, for eyes and for grep.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from reporting.epoch_lines import averages_line
from reporting.log_line import clock
from reporting.run_yaml import read_run_yaml
from reporting.tables import value_range


def end_figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest peak of any rank and the best evaluation of a run, from its events."""
    peaks = [event["peak_allocated_gib"] for event in events if event["event"] == "memory"]
    losses = [event["loss"] for event in events if event["event"] == "eval" and event["step"] > 0]
    return {
        "peak_allocated_gib": max(peaks, default=None),
        "best_eval_loss": min((loss for loss in losses if loss is not None), default=None),
    }


def end_summary(events: Iterable[dict[str, Any]], folder: Path, *, device_type: str) -> list[Any]:
    """The results: what held the memory at each phase, losses, speed, time, and where the weights are.

    Args:
        events: all of the run's, as read from metrics.jsonl.
    """
    events = list(events)
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(event["event"], []).append(event)
    parts: list[Any] = []
    if memory := of.get("memory"):
        parts.append(_memory_table(memory, device_type))
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
    if averages := averages_line(events):
        parts.append(averages)
    if scored := [event for event in evals or () if "rougeL" in event]:
        best = max(scored, key=lambda event: event["rougeL"])
        parts.append(
            f"rougeL {scored[0]['rougeL']:.2f} (step {scored[0]['step']}) -> {scored[-1]['rougeL']:.2f} "
            f"(step {scored[-1]['step']}), best {best['rougeL']:.2f} (step {best['step']})"
        )
    for end in of.get("end", []):
        in_steps = sum(event["step_seconds"] for event in of.get("train", []))
        parts.append(f"train time {clock(in_steps)} of {clock(end['seconds'])} | {_peaks(of.get('memory', []))}")
    if saved := read_run_yaml(folder).get("saved"):
        parts.append(f"weights {folder / saved['folder']} (of step {saved['step']})")
    elif any(end["status"] == "stopped" for end in of.get("end", [])):
        parts.append(f"weights in the checkpoint alone; to take them out: python -m tools.export {folder} --to DIR")
    else:
        parts.append("weights not saved")
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
    """The highest figures of each rank: allocated and, on GPUs, reserved; and host memory, at the phases of steps."""
    highest: dict[str, dict[int, float]] = {"peak_allocated_gib": {}, "reserved_gib": {}, "host_rss_gib": {}}
    for event in memory:
        for name, of_rank in highest.items():
            if event[name] is not None:
                of_rank[event["rank"]] = max(event[name], of_rank.get(event["rank"], 0.0))
    ranges = {name: value_range(of_rank.values(), ".3f") for name, of_rank in highest.items() if of_rank}
    if not ranges:
        return "peak memory not measured"
    reserved = f", reserved {ranges['reserved_gib']}" if "reserved_gib" in ranges else ""
    return (
        f"peak memory {ranges['peak_allocated_gib']} GiB{reserved}, host {ranges['host_rss_gib']}, "
        f"over {len(highest['peak_allocated_gib'])} rank(s)"
    )


def _loss(event: dict[str, Any]) -> str:
    return "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
