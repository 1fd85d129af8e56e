"""--load_only: the memory of each rank after loading, next to the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil
import torch
from rich.table import Table
from torch import nn

from ranks.collectives import gather_to_all
from ranks.environment import Environment
from reporting.memory_ledger import local_bytes
from utils.host_memory import peak_resident
from utils.units import GIB


class Loaded(NamedTuple):
    """The memory of one rank after loading, in GiB."""

    params: float  # and buffers
    allocated: float | None  # by torch on its GPU; None on CPU, where torch does not count it
    peak_allocated: float | None
    host: float  # resident, with the libraries
    host_peak: float


def loaded_on_all(model: nn.Module, env: Environment) -> list[Loaded]:
    """The memory of each rank. Every rank must call this."""
    return gather_to_all(_loaded(model, env))


def _loaded(model: nn.Module, env: Environment) -> Loaded:
    held = sum(local_bytes([*model.parameters(), *model.buffers()]).values())
    resident = psutil.Process().memory_info().rss
    peak = max(resident, peak_resident())
    allocated: tuple[float | None, float | None] = (None, None)
    if env.device.type == "cuda":
        most = torch.cuda.max_memory_allocated(env.device)
        allocated = (torch.cuda.memory_allocated(env.device) / GIB, most / GIB)
    return Loaded(held / GIB, *allocated, resident / GIB, peak / GIB)


def load_table(found: list[Loaded], plan: dict[str, Any] | None) -> Table:
    """One line for each rank, below the line of the plan, if there is one."""
    names = ("params", "allocated", "peak allocated", "host memory", "host peak")
    table = Table(box=None, pad_edge=False, title="GiB after loading", title_justify="left", title_style="bold")
    for name in ("rank", *names):
        table.add_column(name, justify="left" if name == "rank" else "right")
    if plan is not None:
        load = plan["phases"]["load"]
        figures = (load["params"], load["params"], sum(load.values()), None, plan["host_load_gib"])
        table.add_row("planned", *map(_gib, figures))
    for rank, loaded in enumerate(found):
        table.add_row(str(rank), *map(_gib, loaded))
    return table


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
