"""`--save_metrics`: losses and perplexities as llama-recipes writes them, one JSON file of eight lists."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reporting.events import figures, number
from reporting.log_line import perplexity
from reporting.metrics_file import json_number


def write_metrics_data(folder: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write metrics_data.json. A val step is one evaluation, a val epoch an epoch's last evaluation.

    In the lists by step, a loss that is not finite or not known is null.

    Args:
        events: all of the run's, as read from metrics.jsonl.
    """
    events = list(events)
    steps = [number(event.get("loss")) for event in events if event["event"] == "train"]
    epochs = [event for event in events if event["event"] == "epoch"]
    evals = [number(event.get("loss")) for event in events if event["event"] == "eval" and event["step"] > 0]
    val_epochs = figures(epochs, "eval_loss")
    lists: dict[str, list[Any]] = {
        "train_step_loss": steps,
        "train_epoch_loss": [number(event.get("train_loss")) for event in epochs],
        "val_step_loss": evals,
        "val_epoch_loss": val_epochs,
    }
    lists |= {
        name.replace("loss", "perplexity"): [None if loss is None else json_number(perplexity(loss)) for loss in losses]
        for name, losses in lists.items()
    }
    (folder / "metrics_data.json").write_text(json.dumps(lists, indent=1))
