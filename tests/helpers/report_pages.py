"""Pages of tools.report read back, and run folders made for them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.contract import PHASES


@dataclass
class Page(HTMLParser):
    """What a page shows: its elements with their attributes, tables as rows of texts, and the data of its curves."""

    html: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)  # by element

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []
        self.feed(self.html)
        self.tables = [[[" ".join(cell.split()) for cell in row] for row in table] for table in self.tables]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "link", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)
        if {"td", "th"} & set(self._open) and self.tables:
            self.tables[-1][-1][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """What the curves are drawn from."""
        return json.loads(self.texts["script"][0])

    @property
    def notices(self) -> list[str]:
        found = re.findall(r'<li class="(?:bad|note)"><strong>(.*?)</strong> (.*?)</li>', self.html)
        return [unescape(f"{name} {text}") for name, text in found]

    def table(self, first_cell: str) -> dict[str, list[str]]:
        """The rows of the first table that begins with this cell, by their names."""
        found = next(table for table in self.tables if table and table[0][0] == first_cell)
        return {row[0]: row[1:] for row in found if len(row) > 1}

    def figures(self) -> dict[str, list[str]]:
        return self.table("figure")


def long_run(folder: Path, *, num_steps: int, num_ranks: int, spike: int) -> None:
    """A run folder as a long run would leave it: a falling loss with one spike, and one dip after it."""
    folder.mkdir(parents=True)
    settings = {"train_config": {"lr": 1e-4, "model_name": "M"}, "planning_config": {"price_per_hour": 2.0}}
    (folder / "run.yaml").write_text(yaml.safe_dump({"settings": settings, "world_size": num_ranks}))
    with open(folder / "metrics.jsonl", "w") as file:

        def write(event: str, **values: Any) -> None:
            file.write(json.dumps({"event": event} | values) + "\n")

        write("start", world_size=num_ranks, num_steps=num_steps)
        for step in range(1, num_steps + 1):
            loss = 2 + math.sin(step * 1.7) / 9 + 3 / (1 + step / 500)
            loss = {spike: 77.25, spike + 1: 0.125}.get(step, loss)
            seconds = 0.1 + math.sin(step) / 31
            write("train", step=step, epoch=1, loss=loss, grad_norm=loss / 3.0001, lr=1e-4 * (1 - step / num_steps / 3),
                  num_tokens=4096 + step % 7, step_seconds=seconds, tokens_per_second=4096 / seconds,
                  tokens_per_second_per_device=4096 / seconds / num_ranks, model_tflops_per_device=seconds * 113.1,
                  data_wait_seconds=seconds / (11 + step % 5))  # fmt: skip
            if step <= 2 or step % 50 == 0:
                for rank in range(num_ranks):
                    for place, phase in enumerate(PHASES):
                        parts = {f"{name}_gib": 1 + place / 3 + rank / 17 for name in ("params", "grads", "optimizer")}
                        write("memory", step=step, phase=phase, rank=rank, **parts, activations_gib=2.0 * (place == 1),
                              other_gib=0.1, allocated_gib=6.123, peak_allocated_gib=7 + rank / 10 + step / 1e4,
                              reserved_gib=9.5, host_rss_gib=1.25, num_alloc_retries=0)  # fmt: skip
            if step % 500 == 0:
                write("eval", step=step, epoch=1, loss=loss + 0.1, num_label_tokens=1000)
        write("end", step=num_steps, status="finished", seconds=num_steps * 0.125)
