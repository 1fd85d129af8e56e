"""Judges the ranks' reports: go on, or end, with one line that says which rank failed and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from supervision.patience import USUAL, Patience
from utils.units import readable

State = Literal["running", "failing", "told", "refused", "finished"]
"""The state of a rank's main thread.

failing: it holds an error and lets others speak first; told: it has told it; refused: it has told a refusal.
"""


@dataclass(frozen=True)
class Report:
    """A watchdog's report on its rank's main thread."""

    state: State
    place: str  # its step, or what it does outside of one
    where: str  # the line of code that it is at
    num_collectives: int  # entered so far, over all process groups
    still_seconds: float  # since it was last seen moving
    limit_seconds: float  # how long it may take where it is
    resident_bytes: int = 0  # of host memory


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision on how all ranks go on."""

    kind: Literal["go", "finished", "over", "refused", "hang"]
    ranks: tuple[int, ...] = ()  # those that failed; if all go on, those that hold an error and wait for others to tell
    message: str = ""  # the line for the user; empty if a rank has printed its own
    last_seen: str = ""  # a clause: host memory that lost ranks held in their last reports


def judge(reports: Sequence[Report], patience: Patience = USUAL) -> Verdict:
    """The verdict on every rank's report, by rank.

    Every rank enters the same collectives in the same order. So when all stand still, the ranks that have entered the
    fewest are the ones that the others wait for.
    """
    states = [report.state for report in reports]
    if "refused" in states:
        return Verdict("refused")
    if "told" in states:
        return Verdict("over")
    if set(states) == {"finished"}:
        return Verdict("finished")
    # They speak once others have had time to; until then it is not known whose failure it is.
    if failing := tuple(rank for rank, state in enumerate(states) if state == "failing"):
        return Verdict("go", failing)
    if all(report.still_seconds <= report.limit_seconds for report in reports):
        return Verdict("go")
    fewest = min(report.num_collectives for report in reports)
    ranks = tuple(rank for rank, report in enumerate(reports) if report.num_collectives == fewest)
    first, seconds = reports[ranks[0]], max(report.still_seconds for report in reports)
    if len(ranks) == len(reports):
        message = (
            f"no rank went on for {seconds:.0f} s, all {first.place} and in the same collective ({first.where}): "
            "the network between them does not carry it, or a step takes longer"
        )
    else:
        message = f"{names_of(ranks)} stopped {first.place} ({first.where}); the others waited {seconds:.0f} s"
    if first.limit_seconds < patience.long_seconds:
        message += "; if a step may take so long: --step_timeout_seconds"
    return Verdict("hang", ranks, message)


def judge_lost(lost: dict[int, float | None], place: str, reports: Mapping[int, Report] | None = None) -> Verdict:
    """The verdict on ranks whose watchdogs no longer report.

    Args:
        lost: by rank, for how many seconds it has been silent, or None if its connection has closed.
        place: where this rank is. The lost ones were there too, since none gets ahead of the others.
        reports: the last that this rank has of others.
    """
    closed = tuple(rank for rank, silent_seconds in lost.items() if silent_seconds is None)
    if closed:
        message = (
            f"{names_of(closed)} ended {place} (lost its connection); its own output says why; exit status -9 or "
            "137 usually means that the machine ran out of host memory"
        )
        held = [f"rank {r} {readable(reports[r].resident_bytes)}" for r in closed if reports and r in reports]
        return Verdict("over", closed, message, f"; last seen holding: {', '.join(held)}" if held else "")
    seconds = max(silent_seconds or 0 for silent_seconds in lost.values())
    message = (
        f"{names_of(tuple(lost))} stopped answering {place}, {seconds:.0f} s ago: its machine is gone, or its "
        "whole process stands still"
    )
    return Verdict("hang", tuple(lost), message)


def names_of(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
