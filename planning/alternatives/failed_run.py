"""What a run that failed needed, and what that says of runs with other flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from configs.run import RunConfig

OF_STEPS = ("forward", "backward")
"""Phases whose memory grows with the tokens of a micro-batch."""


class Predicted(Protocol):
    """The plan of a run with changed flags."""

    @property
    def peak_gib(self) -> float: ...
    @property
    def seconds_per_step(self) -> float | None: ...
    @property
    def num_tokens(self) -> float:
        """Tokens of a rank's micro-batch."""

    def phase_gib(self, phase: str) -> float:
        """The fullest moment of a phase; the peak for a phase that plans do not have."""


@dataclass(frozen=True)
class Plans:
    """Plans runs, next to the memory that the failed one needed."""

    predict: Callable[[RunConfig], Predicted]
    needed_gib: float  # in the phase where memory ran out, at least
    room_gib: float  # of the device, for torch's allocator
    unused_gib: float = 0.0  # of that, reserved in pieces that were too small

    @property
    def missing_gib(self) -> float:
        """What a change has to save at least."""
        return max(0.0, self.needed_gib + self.unused_gib - self.room_gib)


def excess_gib(before: Predicted, after: Predicted, phase: str, plans: Plans) -> tuple[float, float]:
    """What a changed run needs in this phase beyond its plan, and what it loses to fragments, as the failed run did.

    Forward and backward needed as much more for each token of a micro-batch, other phases as much in all.
    """
    share = min(1.0, after.num_tokens / before.num_tokens) if phase in OF_STEPS else 1.0
    return share * max(0.0, plans.needed_gib - before.phase_gib(phase)), share * plans.unused_gib
