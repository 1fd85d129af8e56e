"""Global batches that are cut over ranks, micro-batches and accumulation at random, the same way every time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

LARGEST_BATCH = 12


@dataclass(frozen=True)
class Cut:
    ranks: int
    micro_batch: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        return self.ranks * self.micro_batch * self.accumulation

    @property
    def flags(self) -> list[str]:
        return f"--batch_size_training {self.micro_batch} --gradient_accumulation_steps {self.accumulation}".split()


def random_cut(*seed: object, ranks: Sequence[int] = (2, 3)) -> Cut:
    """A cut of at most 12 rows, drawn by a seed of any printed values; `ranks` says how many there may be."""
    generator = random.Random("-".join(map(str, seed)))
    ranks_drawn = generator.choice(ranks)
    sizes = [(micro, steps) for micro in range(1, 5) for steps in range(1, 4)]
    fitting = [size for size in sizes if size[0] * size[1] * ranks_drawn <= LARGEST_BATCH]
    return Cut(ranks_drawn, *generator.choice(fitting))


def draws(number: int) -> list[Any]:
    """Numbers of cuts for `parametrize`: the first is a fast test, the others are run by `make test-all`."""
    return [0, *(pytest.param(draw, marks=pytest.mark.full) for draw in range(1, number))]
