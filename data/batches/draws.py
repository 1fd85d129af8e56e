"""Random numbers whose place in their sequence can be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


class Draws(Iterator[int]):
    """Endless random numbers, drawn many at a time: a single draw costs as much as a sequence.

    Args:
        draw: draws them, as many each time.
    """

    def __init__(self, rng: np.random.Generator, draw: Callable[[np.random.Generator], list[int]]) -> None:
        self.rng, self.draw = rng, draw
        self._before = rng.bit_generator.state
        self._numbers: list[int] = []
        self._num_used = 0

    def __next__(self) -> int:
        if self._num_used == len(self._numbers):
            self._before = self.rng.bit_generator.state
            self._numbers, self._num_used = self.draw(self.rng), 0
        self._num_used += 1
        return self._numbers[self._num_used - 1]

    def state(self) -> dict[str, Any]:
        """The generator before the last draw, and how many of its numbers were used."""
        return {"generator": self._before, "num_used": self._num_used}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.rng.bit_generator.state = self._before = state["generator"]
        self._numbers, self._num_used = [], 0
        for _ in range(state["num_used"]):
            next(self)
