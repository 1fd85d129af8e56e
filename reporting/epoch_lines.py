"""The lines of an epoch and of all epochs together, with the names that llama-recipes prints."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from reporting.log_line import perplexity


def epoch_line(epoch: int, seconds: float, train_loss: float, eval_loss: float | None) -> str:
    """One greppable line, when an epoch has ended.

    Args:
        epoch: counted from 1.
        seconds: of its steps and evaluations.
        eval_loss: of the evaluation at its end; None if there was none.
    """
    figures = {"train_perplexity": perplexity(train_loss), "train_epoch_loss": train_loss}
    if eval_loss is not None:
        figures |= {"eval_perplexity": perplexity(eval_loss), "eval_epoch_loss": eval_loss}
    return f"Epoch {epoch}: {_joined(figures)}, epoch time {seconds:.1f}s"


def averages_line(events: Iterable[dict[str, Any]]) -> str:
    """The averages over the epochs of a run; empty if no epoch has ended.

    Args:
        events: all of the run's, as read from metrics.jsonl.
    """
    events = list(events)
    epochs = [event for event in events if event["event"] == "epoch"]
    if not epochs:
        return ""
    figures: dict[str, float] = {}
    for split, prefix in (("train", "avg_train"), ("eval", "avg_eval")):
        losses = [event[f"{split}_loss"] for event in epochs if event[f"{split}_loss"] is not None]
        if losses:
            figures |= {f"{prefix}_prep": fmean(map(perplexity, losses)), f"{prefix}_loss": fmean(losses)}
    figures["avg_epoch_time"] = fmean(event["seconds"] for event in epochs)
    if saves := [event["seconds"] for event in events if event["event"] == "checkpoint"]:
        figures["avg_checkpoint_time"] = fmean(saves)
    return f"averages over {len(epochs)} epoch(s): {_joined(figures)}"


def _joined(figures: dict[str, float]) -> str:
    return ", ".join(f"{name}={value:.4f}" for name, value in figures.items())
