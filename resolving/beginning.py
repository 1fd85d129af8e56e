"""How a run was started first; some settings keep to that when it goes on with another number of ranks."""

from __future__ import annotations

from typing import Any, NamedTuple


class Beginning(NamedTuple):
    """How the run was started first."""

    world_size: int  # ranks with rows of their own: those that share rows count once
    batch_size_training: int
    packed_length: int | None = None  # tokens to fill packed rows with, as --min_steps chose; None: context_length

    @property
    def rows_per_micro_batch(self) -> int:
        """Of all ranks together."""
        return self.world_size * self.batch_size_training

    @classmethod
    def of(cls, values: dict[str, Any]) -> Beginning | None:
        """From a checkpoint's state.json; None if an earlier version wrote it."""
        return cls(**values["began_with"]) if "began_with" in values else None
