"""A run on ranks that seem to have no memory left: sharded weights are never gathered whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import finetuning
import policies.generating


def without_memory(argv: Sequence[str]) -> Callable[[], int]:
    """What `ProcessGroup.train` runs instead of the flags."""
    return partial(_train, tuple(argv))


def _train(argv: Sequence[str]) -> int:
    policies.generating.free_bytes = lambda env: 0  # in this process alone
    return finetuning.main(argv)
