"""A run's results: the figures of its `end` event, and the table and lines that a person sees.

Each line begins with its subject, for eyes and for grep.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from reporting.epoch_lines import averages_line
from reporting.events import figures, number
from reporting.log_line import clock
from reporting.tables import value_range
from run_folder.run_yaml import SavedEntry
from utils.wording import plural


def end_figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest peak of any rank and the best evaluation of a run, from its events."""
    memory = [event for event in events if event["event"] == "memory"]
    # Not the evaluation before training, at step 0: the model was not trained yet.
    evals = [event for event in events if event["event"] == "eval" and event["step"] > 0]
    return {
        "peak_allocated_gib": max(figures(memory, "peak_allocated_gib"), default=None),
        "best_eval_loss": min(figures(evals, "loss"), default=None),
    }


def end_summary(
    events: Iterable[dict[str, Any]], folder: Path, *, device_type: str, saved: SavedEntry | None = None
) -> list[Any]:
    """The results: memory by part at each phase, losses, speed, time, and where the weights are.

    All results are saved by now, so nothing fails here: unknown figures are left out.

    Args:
        events: all of the run's, as read from metrics.jsonl. Those of earlier sessions may lack any figure.
        saved: the saved weights.
    """
    events = list(events)
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(event["event"], []).append(event)
    parts: list[Any] = []
    if memory := of.get("memory"):
        parts.append(_memory_table(memory, device_type))
    if training := _training(of.get("train", [])):
        parts.append(training)
    if evals := _with_loss(of.get("eval", [])):
        finite = [event for event in evals if event["loss"] is not None]
        best = min(finite, key=lambda event: event["loss"], default=evals[-1])
        parts.append(
            f"eval loss {_loss(evals[0])} (step {evals[0]['step']}) -> {_loss(evals[-1])} "
            f"(step {evals[-1]['step']}), best {_loss(best)} (step {best['step']})"
        )
    if averages := averages_line(events):
        parts.append(averages)
    if scored := [event for event in of.get("eval", []) if number(event.get("rougeL")) is not None]:
        best = max(scored, key=lambda event: event["rougeL"])
        parts.append(
            f"rougeL {scored[0]['rougeL']:.2f} (step {scored[0]['step']}) -> {scored[-1]['rougeL']:.2f} "
            f"(step {scored[-1]['step']}), best {best['rougeL']:.2f} (step {best['step']})"
        )
    for end in of.get("end", []):
        parts.append(f"{_times(of.get('train', []), end)}{_peaks(of.get('memory', []))}")
    if saved is not None:
        parts.append(f"weights {folder / saved['folder']} (of step {saved['step']})")
    elif any(end.get("status") == "stopped" for end in of.get("end", [])):
        parts.append(f"weights in the checkpoint alone; to take them out: python -m tools.export {folder} --to DIR")
    else:
        parts.append("weights not saved")
    return parts


def _training(train: list[dict[str, Any]]) -> str:
    """The losses and the speed of the steps."""
    parts = []
    if known := _with_loss(train):
        parts.append(f"train loss {_loss(known[0])} -> {_loss(known[-1])} over {plural(len(train), 'step')}")
    # The first quarter is left out: it warms up, and may compile.
    if steady := sorted(figures(train[len(train) // 4 :], "tokens_per_second")):
        parts.append(f"median {steady[len(steady) // 2]:,.0f} tokens/s")
    return ", ".join(parts)


def _times(train: list[dict[str, Any]], end: dict[str, Any]) -> str:
    """The time in steps and in all, for the start of a line."""
    in_steps, in_all = figures(train, "step_seconds"), number(end.get("seconds"))
    if train and not in_steps:
        return "" if in_all is None else f"time {clock(in_all)} | "
    return f"train time {clock(sum(in_steps))}{'' if in_all is None else f' of {clock(in_all)}'} | "


def _memory_table(memory: list[dict[str, Any]], device_type: str) -> Table:
    last = max(event["step"] for event in memory)
    at_last = [event for event in memory if event["step"] == last]
    num_ranks = len({event["rank"] for event in at_last})  # earlier sessions may have had others
    of = "resident memory" if device_type == "cpu" else "allocated memory"
    table = Table(title=f"{of} at step {last}, GiB, the fullest of {plural(num_ranks, 'rank')}", title_justify="left")
    columns = ("params", "grads", "optimizer", "activations", "other", "allocated", "peak_allocated")
    for heading in ("phase", *columns):
        table.add_column(heading.replace("_allocated", ""), justify="left" if heading == "phase" else "right")
    for phase in dict.fromkeys(event["phase"] for event in at_last):
        of_phase = [event for event in at_last if event["phase"] == phase]
        fullest = max(of_phase, key=lambda event: number(event.get("allocated_gib")) or 0.0)
        table.add_row(phase, *(_gib(fullest.get(f"{name}_gib")) for name in columns))
    return table


def _peaks(memory: list[dict[str, Any]]) -> str:
    """The highest figures of each rank: allocated and, on GPUs, reserved; and host memory, at the phases of steps."""
    highest: dict[str, dict[int, float]] = {"peak_allocated_gib": {}, "reserved_gib": {}, "host_rss_gib": {}}
    for event in memory:
        for name, of_rank in highest.items():
            if (gib := number(event.get(name))) is not None:
                of_rank[event["rank"]] = max(gib, of_rank.get(event["rank"], 0.0))
    ranges = {name: value_range(of_rank.values(), ".3f") for name, of_rank in highest.items() if of_rank}
    if not ranges:
        return "peak memory not measured"
    texts = {"peak_allocated_gib": "{} GiB", "reserved_gib": "reserved {}", "host_rss_gib": "host {}"}
    shown = ", ".join(text.format(ranges[name]) for name, text in texts.items() if name in ranges)
    return f"peak memory {shown}, over {plural(max(map(len, highest.values())), 'rank')}"


def _gib(value: Any) -> str:
    gib = number(value)
    return "-" if gib is None else f"{gib:.3f}"


def _with_loss(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events whose loss is known: a number, or null if it was not finite."""
    return [event for event in events if event.get("loss", "") is None or number(event.get("loss")) is not None]


def _loss(event: dict[str, Any]) -> str:
    return "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
