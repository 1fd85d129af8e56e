"""The account of a run whose memory ran out: its parts, the plan, and commands that need less."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planning.alternatives.less_memory import Change
from planning.memory.memory_plan import verdict_in_room
from planning.out_of_memory.failure_scene import FailedBatch, FailedLayer
from utils.memory_errors import EXPANDABLE_SEGMENTS, AllocatorFigures, grows_segments
from utils.units import GIB, readable

PARTS = ("params", "grads", "optimizer", "activations", "other")
"""The parts of allocated memory, as in a `memory` event."""

NUM_LARGEST = 3
_MANY_BYTES, _MANY_PIECES = 2**28, 0.05  # of what is reserved: above both, it is in pieces
_IN_WORDS = {
    "load": "while the model was loaded",
    "data": "while the next batch was made",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer_step": "in the optimizer step",
    "evaluation": "in an evaluation",
    "generation": "while generating",
    "saving": "while saving",
}
_LABELS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "other": "other",
}


@dataclass(frozen=True)
class Suggestion:
    """A change, and the whole command with it."""

    change: Change
    command: str

    def to_dict(self) -> dict[str, Any]:
        return self.change.to_dict() | {"command": self.command}


@dataclass(frozen=True)
class MemoryAccount:
    """One rank's facts about the moment when its memory ran out. Sizes in bytes."""

    whose: str  # "device" or "host"
    rank: int
    world_size: int
    host: str
    phase: str  # one of `planning.out_of_memory.failure_scene.PHASES`
    step: int  # 0 before the first one
    layer: FailedLayer | None
    batch: FailedBatch | None
    figures: AllocatorFigures  # all None for host memory
    num_alloc_retries: int
    parts: Mapping[str, int]  # of what is allocated on the device, by PARTS; empty if that is not known
    largest: Mapping[str, Sequence[tuple[str, int]]]  # of params, grads and optimizer, by parameter
    host_figures: Mapping[str, float]  # in GiB
    plan: Mapping[str, Any] | None  # plan.json's section on memory
    error: str  # the first line of the library's

    @property
    def is_fragmented(self) -> bool:
        """Whether the requested bytes were free in the allocator's cache, but in smaller pieces."""
        asked, unused = self.figures.asked, self.figures.unused
        return asked is not None and bool(unused) and 0 < asked <= (unused or 0) + (self.figures.free or 0)

    @property
    def is_in_pieces(self) -> bool:
        """Whether much was reserved and not used."""
        unused, reserved = self.figures.unused or 0, self.figures.reserved or 0
        return self.is_fragmented or unused >= max(_MANY_BYTES, _MANY_PIECES * reserved)

    def lines(self) -> list[str]:
        """The account for people. The first line says it all in one."""
        lines = [self._headline()]
        rows = {
            "batch": str(self.batch) if self.batch else "",
            **{_LABELS[part]: self._part(part) for part in PARTS if part in self.parts},
            "allocated": self._allocated(),
            "fragmentation": self._fragmentation(),
            "host memory": ", ".join(f"{name} {value:.2f} GiB" for name, value in self.host_figures.items()),
            "planned": self._planned(),
        }
        lines += [f"  {name:<14} {text}" for name, text in rows.items() if text]
        return lines

    def _headline(self) -> str:
        where = f"rank {self.rank} of {self.world_size} on {self.host}, {_IN_WORDS[self.phase]}"
        if self.step:
            where += f" of step {self.step}" if self.phase in ("forward", "backward", "optimizer_step") else ""
            where += f" after step {self.step}" if self.phase in ("evaluation", "generation", "saving") else ""
        if self.layer:
            where += f" ({self.layer.module})"
        headline = f"out of {self.whose} memory: {where}"
        asked, free, capacity = self.figures.asked, self.figures.free, self.figures.capacity
        if asked is not None:
            headline += f"; {readable(asked)} more were asked for"
        if free is not None and capacity is not None:
            headline += f", {readable(free)} of {readable(capacity)} were free"
        return headline if asked is not None else f"{headline}; {self.error}"

    def _part(self, part: str) -> str:
        text = readable(self.parts[part])
        if largest := self.largest.get(part):
            text += "   largest: " + ", ".join(f"{name} {readable(size)}" for name, size in largest[:NUM_LARGEST])
        each = self.bytes_per_layer()
        if part == "activations" and each is not None and self.layer is not None:
            text += f"   of {self.layer.index} of {self.layer.num_layers} layers, {readable(each)} each"
        return text

    def bytes_per_layer(self) -> float | None:
        """The activations of one layer, if forward had passed some of the layers; else None."""
        if self.phase != "forward" or self.layer is None or not self.layer.index or "activations" not in self.parts:
            return None
        return self.parts["activations"] / self.layer.index

    def _allocated(self) -> str:
        figures = self.figures
        if figures.allocated is None:
            return ""
        text = readable(figures.allocated)
        if figures.reserved is not None:
            text += f", reserved {readable(figures.reserved)}"
        if figures.free is not None and figures.capacity is not None:
            text += f", free {readable(figures.free)} of {readable(figures.capacity)}"
        if figures.this_process is not None and figures.reserved is not None:
            text += f", CUDA's and NCCL's own {readable(max(0, figures.this_process - figures.reserved))}"
        if figures.other_processes is not None:
            text += f", other processes {readable(figures.other_processes)}"
        return f"{text}, retries after emptying the cache: {self.num_alloc_retries}"

    def _fragmentation(self) -> str:
        if not self.is_in_pieces:
            return ""
        text = f"{readable(self.figures.unused or 0)} were reserved and not used, in pieces"
        text += f" smaller than {readable(self.figures.asked)}" if self.figures.asked else ""
        if grows_segments():
            return f"{text}, although segments may grow (expandable_segments:True)"
        (setting,) = (f"{name}={value}" for name, value in EXPANDABLE_SEGMENTS.items())
        return f"{text}; {setting} lets pieces grow instead"

    def _planned(self) -> str:
        if self.plan is None:
            return ""
        in_phase = self.plan.get("phases", {}).get(self.phase)
        text = f"{readable(sum(in_phase.values()) * GIB)} in this phase, " if in_phase else ""
        text += f"at most {readable(self.plan['peak_gib'] * GIB)} ({self.plan['peak_phase']})"
        if (room := self.figures.room) is None:
            return text
        # The plan knew the device's free memory at the start of the run; `room` is that of now.
        verdict = verdict_in_room(self.plan["peak_gib"], room / GIB)
        said = {"fits": "should have fit", "tight": "should have fit, with little to spare"}
        text += f", of {readable(room)} that torch may take: {said.get(verdict, 'does not fit')}"
        return text + self._more_than_planned(sum(in_phase.values()) if in_phase else None)

    def _more_than_planned(self, planned_gib: float | None) -> str:
        """A clause on what the phase needed beyond its plan, with which the changes are planned."""
        needed = self.figures.needed
        if planned_gib is None or needed is None or needed <= planned_gib * GIB:
            return ""
        more = needed - planned_gib * GIB
        each = ""
        if self.phase in ("forward", "backward") and self.batch is not None:
            each = f", {readable(more / (self.batch.rows * self.batch.width))} for each token"
        return f"; it needed {readable(needed)} and more, so changes are planned with {readable(more)} more{each}"

    def to_dict(self) -> dict[str, Any]:
        """The account as in oom.json, sizes in GiB; null: not known."""
        figures = asdict(self.figures) | {"reserved": self.figures.reserved}
        each = self.bytes_per_layer()
        return {
            "whose": self.whose,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "phase": self.phase,
            "step": self.step,
            "module": self.layer.module if self.layer else None,
            "layer": self.layer.index if self.layer else None,
            "num_layers": self.layer.num_layers if self.layer else None,
            "batch": self.batch.to_dict() if self.batch else None,
            **{f"{name}_gib": None if size is None else size / GIB for name, size in figures.items()},
            **{f"{part}_gib": self.parts[part] / GIB if part in self.parts else None for part in PARTS},
            "activations_per_layer_gib": None if each is None else each / GIB,
            "num_alloc_retries": self.num_alloc_retries,
            "fragmented": self.is_fragmented,
            "largest": {
                owner: [{"name": name, "gib": size / GIB} for name, size in sizes]
                for owner, sizes in self.largest.items()
            },
            "host_memory": dict(self.host_figures),
            "plan": self.plan,
            "error": self.error,
        }


def suggestion_lines(suggestions: Sequence[Suggestion]) -> list[str]:
    """The suggested commands, for people."""
    lines = ["changes that need less, the cheapest first:"] if suggestions else []
    if suggestions and all(suggestion.change.fits is False for suggestion in suggestions):
        lines = ["no planned change fits; the smallest peaks:"]
    for number, (change, command) in enumerate(((s.change, s.command) for s in suggestions), 1):
        facts = []
        if change.saves_gib is not None:
            facts.append(f"saves {readable(change.saves_gib * GIB)}")
        if change.peak_gib is not None:
            fits = "fits, with little to spare" if change.is_tight else "fits" if change.fits else "does not fit alone"
            facts.append(f"peak {readable(change.peak_gib * GIB)}, {fits}")
        if change.slower is not None:
            facts.append(f"{100 * (change.slower - 1):+.0f} % time per step")
        if not change.keeps_result:
            facts.append("changes the result")
        flags = shlex.join(change.flags) or " ".join(f"{name}={value}" for name, value in change.environment.items())
        lines.append(f"  {number}. {flags}   {change.what}" + (f" ({'; '.join(facts)})" if facts else ""))
        lines.append(f"     {command}")
    return lines
