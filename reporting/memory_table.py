"""`--print_memory`: a table, in plain lines, of each rank's memory at the phases of an observed step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_COLUMNS = {
    "params": "params_gib",
    "grads": "grads_gib",
    "optimizer": "optimizer_gib",
    "activations": "activations_gib",
    "other": "other_gib",
    "allocated": "allocated_gib",
    "peak": "peak_allocated_gib",
    "reserved": "reserved_gib",
    "optimizer_cpu": "optimizer_cpu_gib",
    "host": "host_rss_gib",
}
"""The headings, and the keys of a `memory` event."""


class MemoryTable:
    """Makes the table of a step from its `memory` events. `host peak` is the highest `host` of a rank so far."""

    def __init__(self) -> None:
        self._host_peaks: dict[int, float] = {}

    def lines(self, step: int, by_rank: Iterable[Sequence[Mapping[str, Any]]]) -> list[str]:
        """The table of one step.

        Args:
            by_rank: for each rank its events' figures, in the order of the phases.
        """
        table = [["rank", "phase", *_COLUMNS, "host peak", "retries"]]
        for rank, entries in enumerate(by_rank):
            for entry in entries:
                peak = max(entry["host_rss_gib"], self._host_peaks.get(rank, 0.0))
                self._host_peaks[rank] = peak
                figures = [_gib(entry[name]) for name in _COLUMNS.values()]
                table.append([str(rank), entry["phase"], *figures, _gib(peak), str(entry["num_alloc_retries"])])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return [f"memory at step {step}, GiB:", *(_line(row, widths) for row in table)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.ljust(width) if place == 1 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells)


def _gib(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
