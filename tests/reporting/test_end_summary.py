"""What the end of a run tells of events that an editor or another version wrote: what they hold, and no failure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from reporting.end_summary import end_figures, end_summary
from reporting.llama_recipes_lists import write_metrics_data
from resolving.killed import how_it_was_killed
from tests.helpers.contract import KEYS


def every_event() -> list[dict[str, Any]]:
    """One event of each name, with all its figures."""
    places = {"step": 3, "epoch": 1, "rank": 0, "phase": "after_forward", "status": "finished"}
    events = [{"event": name} | dict.fromkeys(keys.split(), 2.0) for name, keys in KEYS.items()]
    events = [event | {name: value for name, value in places.items() if name in event} for event in events]
    return [event | ({"rougeL": 2.0} if event["event"] == "eval" else {}) for event in events]


def test_the_table_at_the_end_leaves_out_what_no_event_tells(tmp_path: Path) -> None:
    """Those of earlier sessions may have been edited, or be of another version."""
    (tmp_path / "run.yaml").write_text("settings: {}\n")

    def told(**figures: Any) -> list[str]:
        events = [{name: value for name, value in (event | figures).items() if value != ""} for event in every_event()]
        return end_summary(events, tmp_path, device_type="cpu")[1:-1]

    loss, evals, averages, rouge, end = told()
    assert loss == "train loss 2.0000 -> 2.0000 over 1 step, median 2 tokens/s"
    assert end == "train time 0:00:02 of 0:00:02 | peak memory 2.000 GiB, reserved 2.000, host 2.000, over 1 rank"
    assert told(step_seconds="") == [loss, evals, averages, rouge, end.replace("train time 0:00:02 of", "time")]
    assert told(tokens_per_second="", rougeL="")[:2] == [loss.removesuffix(", median 2 tokens/s"), evals]
    assert told(loss="", reserved_gib="", train_loss="", eval_loss="") == [
        "median 2 tokens/s",
        "averages over 1 epoch: avg_epoch_time=2.0000, avg_checkpoint_time=2.0000",
        rouge,
        end.replace("reserved 2.000, ", ""),
    ]


def test_the_table_of_memory_counts_the_ranks_of_its_step(tmp_path: Path) -> None:
    """A run that two ranks began, and one ended."""
    (tmp_path / "run.yaml").write_text("settings: {}\n")
    (memory,) = (event for event in every_event() if event["event"] == "memory")
    earlier = [memory | {"step": 1, "rank": rank} for rank in (0, 1)]
    table = end_summary([*earlier, *every_event()], tmp_path, device_type="cpu")[0]
    assert isinstance(table, Table)
    assert table.title == "resident memory at step 3, GiB, the fullest of 1 rank"


@pytest.mark.parametrize("odd", ["", None, "text", [1], True, 1e50, 1e300, math.nan])
def test_no_figure_that_is_missing_or_odd_fails_a_run_at_its_end(odd: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("settings: {}\n")
    whole = every_event()
    num_parts = len(end_summary(whole, tmp_path, device_type="cpu"))
    for place, event in enumerate(whole):
        for name in event.keys() - {"event", "step", "epoch", "rank", "phase"}:
            edited = {key: value for key, value in event.items() if key != name} | ({name: odd} if odd != "" else {})
            events = [*whole[:place], edited, *whole[place + 1 :]]
            parts = end_summary(events, tmp_path, device_type="cpu")
            assert num_parts - 1 <= len(parts) <= num_parts, (name, parts)
            assert isinstance(end_figures(events)["peak_allocated_gib"], float | None)
            write_metrics_data(tmp_path, events)
            assert len(json.loads((tmp_path / "metrics_data.json").read_text())["train_step_loss"]) == 1
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:-1]))
            assert len(how_it_was_killed(tmp_path)) == 1
