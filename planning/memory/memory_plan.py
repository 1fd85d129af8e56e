"""The planned memory of a run: per rank, part by part and phase by phase, and whether it fits.

`planning.memory.run_memory` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

PHASES = ("load", "forward", "backward", "optimizer_step", "evaluation", "generation")
"""The phases of a run, each with its own fullest moment."""

OF_EVALUATIONS = ("evaluation", "generation")

TIGHT_SHARE = 0.05
"""A run is tight if less than this share of the device's memory stays free. A plan is good to 5 % of the peak."""

ROUNDED_UP = 0.01
"""Share of the peak by which segments of the caching allocator exceed what is allocated in them, as long as all steps
are alike: small blocks share segments of 2 and 20 MiB, larger ones are rounded up to 2 MiB (c10/cuda). Assumed, not
measured. What changing shapes of batches fragment comes on top: a tight plan has no room for that."""

Verdict = Literal["fits", "tight", "does_not_fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "does_not_fit")


def verdict_of(margin_gib: float, capacity_gib: float) -> Verdict:
    """The verdict if `margin_gib` stays free of `capacity_gib`."""
    if margin_gib < 0:
        return "does_not_fit"
    return "tight" if margin_gib < TIGHT_SHARE * capacity_gib else "fits"


def verdict_in_room(peak_gib: float, room_gib: float) -> Verdict:
    """The verdict if torch's allocator may reserve `room_gib`, which contains nothing else that the device holds."""
    return verdict_of(room_gib - (1 + ROUNDED_UP) * peak_gib, room_gib)


@dataclass(frozen=True)
class Parts:
    """The memory that torch's allocator holds at one moment on one rank, by owner, in GiB."""

    params: float = 0.0  # this rank's part of them as they are stored, with buffers and scales of quantized weights
    grads: float = 0.0  # as they wait for the optimizer, and whole ones while micro-batches accumulate unsharded
    optimizer: float = 0.0  # states
    activations: float = 0.0  # what forward keeps for backward, logits and loss included
    unsharded: float = 0.0  # weights gathered or cast for computing, and whole gradients not yet reduced
    communication: float = 0.0  # buffers of all-gather, reduce-scatter and DistributedDataParallel
    temporaries: float = 0.0  # of a layer's forward or backward, of recomputing, or of the optimizer step

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


PARTS = tuple(field.name for field in fields(Parts))


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the fullest rank, in GiB (2^30 bytes).

    `peak_gib` is the value of torch.cuda.max_memory_allocated. The device must hold `overhead_gib` besides. On a CPU
    both together are the resident memory of the process.

    Verdicts compare `peak_gib + overhead_gib` with the capacity: above it a run does not fit. If less than TIGHT_SHARE
    of the capacity is left it is tight: an error of the plan, or fragmentation, may use that up. Otherwise it fits. The
    same holds for host memory, if it is known how much there is; the worse of both verdicts counts.
    """

    phases: Mapping[str, Parts]  # the fullest moment of each of PHASES that the run has
    after_forward_gib: float  # allocated after the first micro-batch's forward of a step, states being there already
    overhead_gib: float  # context, collectives' buffers, rounding; on a CPU the process, its heap, what is offloaded
    capacity_gib: float  # of the device, as its driver gives it
    host_load_gib: float  # host memory of this rank at most while it loads; page cache not counted
    host_training_gib: float  # host memory of this rank at most while it trains
    checkpoint_gib: float  # disk for one checkpoint, all ranks together
    host_capacity_gib: float | None = None  # host memory that this rank may take; None: not known
    moved_gib: float = 0.0  # activations of a micro-batch that wait in host memory
    pinned_gib: float = 0.0  # host memory for them in a typical micro-batch; more is pinned when a wider one comes
    notes: tuple[str, ...] = ()  # lines to print: assumptions of the plan, and memory that it leaves out

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def at_peak(self) -> Parts:
        """The parts at the fullest moment. They add up to `peak_gib`."""
        return self.phases[self.peak_phase]

    @property
    def peak_gib(self) -> float:
        return self.at_peak.total

    @property
    def margin_gib(self) -> float:
        """Memory that stays free at the peak; negative if the run does not fit."""
        return self.capacity_gib - self.peak_gib - self.overhead_gib

    @property
    def verdict(self) -> Verdict:
        """The worse of those on the memory of the device and of its host."""
        return max(self.device_verdict, self.host_verdict, key=VERDICTS.index)

    @property
    def device_verdict(self) -> Verdict:
        return verdict_of(self.margin_gib, self.capacity_gib)

    @property
    def host_verdict(self) -> Verdict:
        """ "fits" if it is not known how much host memory there is."""
        margin = self.host_margin_gib
        return "fits" if margin is None else verdict_of(margin, self.host_capacity_gib or 0.0)

    @property
    def host_margin_gib(self) -> float | None:
        """Host memory that stays free; negative if the run does not fit; None if it is not known how much there is."""
        return None if self.host_capacity_gib is None else self.host_capacity_gib - self.host_gib

    @property
    def lacking_gib(self) -> float:
        """Memory that the run needs and the device or its host lacks."""
        return max(0.0, -self.margin_gib) + max(0.0, -(self.host_margin_gib or 0.0))

    @property
    def host_gib(self) -> float:
        return max(self.host_load_gib, self.host_training_gib)

    def most(self, part: str) -> float:
        """The most that a part holds at the fullest moment of any phase of a training step."""
        return max(getattr(parts, part) for phase, parts in self.phases.items() if phase not in OF_EVALUATIONS)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain types, as --dry_run_json and plan.json hold it.

        Each part is the most that it holds in a step. They need not be there together: `at_peak` adds up to the peak.
        `other_gib` is all else that is there at the peak: unsharded, communication and temporaries.
        """
        at_peak = self.at_peak
        return {
            "verdict": self.verdict,
            "peak_gib": self.peak_gib,
            "peak_phase": self.peak_phase,
            "margin_gib": self.margin_gib,
            "capacity_gib": self.capacity_gib,
            **{f"{part}_gib": self.most(part) for part in PARTS},
            "overhead_gib": self.overhead_gib,
            "other_gib": at_peak.unsharded + at_peak.communication + at_peak.temporaries,
            "after_forward_gib": self.after_forward_gib,
            "host_gib": self.host_gib,
            "host_load_gib": self.host_load_gib,
            "host_training_gib": self.host_training_gib,
            "host_capacity_gib": self.host_capacity_gib,
            "checkpoint_gib": self.checkpoint_gib,
            "moved_gib": self.moved_gib,
            "pinned_gib": self.pinned_gib,
            "at_peak": asdict(at_peak),
            "phases": {phase: asdict(parts) for phase, parts in self.phases.items()},
            "notes": list(self.notes),
        }
