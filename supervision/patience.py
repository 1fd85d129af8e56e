"""How long the ranks of a run wait for each other, and how often they report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ranks.environment import Environment


@dataclass(frozen=True)
class Patience:
    """The durations of supervision."""

    grace_seconds: float = 10.0  # for a launcher to end all ranks, and for rank 0 to speak for all
    lost_seconds: float = 45.0  # for the watchdogs to find out which rank ended
    interval_seconds: float = 5.0  # from one report of a rank to the next
    traces_seconds: float = 3.0  # for the ranks to write the traces of a hang
    long_seconds: float = 3600.0  # for what takes long on a healthy run, such as reading a whole model
    step_seconds: float = 300.0  # for a step, at least, unless --step_timeout_seconds says otherwise


USUAL = Patience()


def patience_of(env: Environment) -> Patience:
    """The usual durations; graces are shorter if the environment says so, the limits of healthy work are not."""
    scale = env.grace_scale
    return replace(
        USUAL,
        grace_seconds=USUAL.grace_seconds * scale,
        lost_seconds=USUAL.lost_seconds * scale,
        interval_seconds=USUAL.interval_seconds * scale,
        traces_seconds=USUAL.traces_seconds * scale,
    )
