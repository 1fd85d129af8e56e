"""The line of an epoch and the averages over all epochs, with the names that llama-recipes prints."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from reporting.events import figures
from reporting.log_line import perplexity, shown_perplexity
from utils.wording import plural


def epoch_line(
    epoch: int, seconds: float, train_loss: float, eval_loss: float | None, *, of_tokens: bool = True
) -> str:
    """The line at the end of an epoch.

    Args:
        epoch: counted from 1.
        seconds: in its steps and evaluations.
        eval_loss: of the evaluation at its end; None if there was none.
        of_tokens: the losses are those of tokens, so they have a perplexity.
    """
    figures = {"train_perplexity": perplexity(train_loss), "train_epoch_loss": train_loss}
    if eval_loss is not None:
        figures |= {"eval_perplexity": perplexity(eval_loss), "eval_epoch_loss": eval_loss}
    figures = {name: value for name, value in figures.items() if of_tokens or not name.endswith("perplexity")}
    return f"Epoch {epoch}: {_joined(figures)}, epoch time {seconds:.1f}s"


def averages_line(events: Iterable[dict[str, Any]]) -> str:
    """The averages over the epochs of a run; empty if no epoch has ended. Unknown figures are left out.

    Args:
        events: all of the run's, as read from metrics.jsonl.
    """
    events = list(events)
    epochs = [event for event in events if event["event"] == "epoch"]
    if not epochs:
        return ""
    averages: dict[str, float] = {}
    steps = [event for event in events if event["event"] == "train"]
    of_tokens = not steps or "perplexity" in steps[0]
    for split, prefix in (("train", "avg_train"), ("eval", "avg_eval")):
        if losses := figures(epochs, f"{split}_loss"):
            averages |= {f"{prefix}_prep": fmean(map(perplexity, losses))} if of_tokens else {}
            averages[f"{prefix}_loss"] = fmean(losses)
    if seconds := figures(epochs, "seconds"):
        averages["avg_epoch_time"] = fmean(seconds)
    if saves := figures((event for event in events if event["event"] == "checkpoint"), "seconds"):
        averages["avg_checkpoint_time"] = fmean(saves)
    return f"averages over {plural(len(epochs), 'epoch')}: {_joined(averages)}" if averages else ""


def _joined(figures: dict[str, float]) -> str:
    return ", ".join(f"{name}={_shown(name, value)}" for name, value in figures.items())


def _shown(name: str, value: float) -> str:
    return shown_perplexity(value, 4) if name.endswith(("perplexity", "prep")) else f"{value:.4f}"
