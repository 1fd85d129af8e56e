"""The losses of a run as a table for a card, with a bar in each row: a curve that every viewer of Markdown shows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from reporting.events import Event, figures, number

MOST_ROWS = 12
_BAR = 20  # characters of the longest


def loss_table(train: Sequence[Event], evals: Sequence[Event]) -> list[str]:
    """Lines of Markdown; none if no loss is known.

    A row's training loss is the mean of the steps after the row before.

    Args:
        train, evals: events by step, ascending.
    """
    rows = []
    before = -1
    for step in _steps(train, evals):
        learned = figures((event for event in train if before < event["step"] <= step), "loss")
        measured = figures((event for event in evals if event["step"] == step), "loss")
        rows.append((step, fmean(learned) if learned else None, measured[-1] if measured else None))
        before = step
    highest = max((value for _, *values in rows for value in values if value is not None), default=0.0)
    if highest <= 0:
        return []
    lines = ["| step | training loss | evaluation loss | |", "|---:|---:|---:|:---|"]
    for step, learned_loss, eval_loss in rows:
        shown = eval_loss if eval_loss is not None else learned_loss
        bar = "█" * max(1, round(_BAR * shown / highest)) if shown is not None else ""
        lines.append(f"| {step} | {_loss(learned_loss)} | {_loss(eval_loss)} | {bar} |")
    return lines


def _steps(train: Sequence[Event], evals: Sequence[Event]) -> list[int]:
    """At most MOST_ROWS steps: those of evaluations if there are some, else of training, evenly taken."""
    evaluated = [event["step"] for event in evals if number(event.get("loss")) is not None]
    trained = [event["step"] for event in train]
    chosen = evaluated if len(evaluated) > 2 else sorted({*evaluated, *_evenly(trained, MOST_ROWS - len(evaluated))})
    return _evenly(chosen, MOST_ROWS)


def _evenly(steps: Sequence[int], most: int) -> list[int]:
    """So many of these steps, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[place * (len(steps) - 1) // (most - 1)] for place in range(most)]


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
