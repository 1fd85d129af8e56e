"""Counts of a pass over a stream so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from data.batches.mixing import source_of
from data.sequences.tokenized import Sequences, TokenSequence
from data.tokens.labels import IGNORE_INDEX
from utils.wording import plural

_NUMBERS = ("num_rows", "num_tokens", "num_label_tokens")


class PassCounts:
    """Counts of what a pass over the stream has given so far."""

    def __init__(self, datasets: tuple[str, ...]) -> None:
        self.datasets = datasets
        self.num_samples: Counter[int] = Counter()  # trained on, by dataset
        self.num_rows = self.num_tokens = self.num_label_tokens = 0
        self.checks: Counter[str] = Counter()  # sequences that were cut or left out

    def add_checks(self, sequences: Sequences) -> None:
        names = [field.name for field in fields(sequences) if field.name.startswith("num_")]
        self.checks.update({name: getattr(sequences, name) for name in names})

    def add_rows(self, rows: Sequence[Sequence[TokenSequence]]) -> None:
        self.num_rows += len(rows)
        for row in rows:
            for sequence in row:
                self.num_samples[source_of(sequence.source_row)] += 1
                self.num_tokens += len(sequence.input_ids)
                self.num_label_tokens += int(np.count_nonzero(sequence.labels != IGNORE_INDEX))

    def state(self) -> dict[str, Any]:
        samples = [self.num_samples[index] for index in range(len(self.datasets))]
        return {name: getattr(self, name) for name in _NUMBERS} | {"num_samples": samples, "checks": dict(self.checks)}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        for name in _NUMBERS:
            setattr(self, name, int(state[name]))
        self.num_samples = Counter(dict(enumerate(map(int, state["num_samples"]))))
        self.checks = Counter({str(name): int(number) for name, number in state["checks"].items()})

    def describe(self, row_length: int | None) -> str:
        """Samples, by dataset if there are several; tokens; rows and how full they are; what was cut or left out."""
        total = sum(self.num_samples.values())
        parts = [f"{plural(total, 'sample')}"]
        if len(self.datasets) > 1:
            shares = [f"{name} {self.num_samples[i]:,}" for i, name in enumerate(self.datasets)]
            parts[0] += f" ({', '.join(shares)})"
        parts.append(f"{self.num_tokens:,} tokens, {self.num_label_tokens:,} of them label tokens")
        fill = f", {100 * self.num_tokens / (self.num_rows * row_length):.1f} % full" if row_length else ""
        parts.append(f"{plural(self.num_rows, 'row')}{fill}")
        # Of what was read: some of it waits to be given.
        checks = [f"{name.removeprefix('num_').replace('_', ' ')} {n:,}" for name, n in self.checks.items() if n]
        return "; ".join([*parts, *(["of the samples read: " + ", ".join(checks)] if checks else [])])
