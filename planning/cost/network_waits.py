"""Lines for the end of a run whose steps waited for the network: how long, its rate, and the layout that would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from planning.cost.link_speeds import GroupSpeeds, Speed, Speeds, expected_speeds
from planning.cost.traffic import Traffic, seconds_per_step
from planning.machines.hardware import Hardware
from policies.sharding import Layout
from reporting.collective_timeline import KINDS
from reporting.events import number
from utils.units import GIB
from utils.wording import plural

MUCH = 1 / 3
"""Fraction of a step that must wait for the network before a line says so."""

_WORTH_SAYING = 1.1  # how many times faster steps would be in another layout
_ROOM_SHARE = 0.95  # of a device's memory that a layout may need to be called one that fits

_FLAGS = {
    "FULL_SHARD": "--sharding_strategy FULL_SHARD",
    "SHARD_GRAD_OP": "--sharding_strategy SHARD_GRAD_OP",
    "HYBRID_SHARD": "--hsdp, sharded inside each node,",
    "NO_SHARD": "--sharding_strategy NO_SHARD",
}


@dataclass(frozen=True)
class RunNetwork:
    """The traffic of a run's steps, and the hardware that carries it."""

    layout: Layout
    traffic: Traffic
    hardware: Hardware

    def lines(self, events: Sequence[Mapping[str, Any]], peaks_gib: Iterable[float]) -> list[str]:
        """Lines to print; none if steps did not wait for the network, or nothing was measured.

        Args:
            events: the run's. Those of earlier sessions may be of other ranks, and do not count.
            peaks_gib: the most memory that each rank has had allocated.
        """
        starts = [place for place, event in enumerate(events) if event["event"] == "start"]
        # A resumed run's file holds earlier sessions, too.
        events = events[starts[-1] :] if starts else events
        taken = {event["step"]: number(event.get("step_seconds")) for event in events if event["event"] == "train"}
        step_seconds = {step: seconds for step, seconds in taken.items() if seconds}
        seen = [event for event in events if event["event"] == "communication" and event["step"] in step_seconds]
        seen = [event for event in seen if number(event.get("exposed_seconds")) is not None]
        seen = [event for event in seen if min(self._total(event, "seconds"), self._total(event, "sent_gb")) > 0]
        if not seen:
            return []
        share = median(event["exposed_seconds"] / step_seconds[event["step"]] for event in seen)
        if share <= MUCH:
            return []
        step = median(step_seconds[event["step"]] for event in seen)
        rate = self._rate(seen)
        return [
            f"communication: a step waits {100 * share:.0f} % of its time for tensors of other ranks "
            f"({share * step:.3g} of {step:.3g} s, median of {plural(len(seen), 'measured step')}); "
            f"each rank sends {8 * rate:.3g} Gbit/s meanwhile",
            self._advice(share, step, rate, held_gib=_held_gib(events), peak_gib=max(peaks_gib)),
        ]

    def _rate(self, seen: Sequence[Mapping[str, Any]]) -> float:
        """Gigabytes per second that a rank sends in collectives: in those that leave the node, if others do not."""
        return median(self._total(event, "sent_gb") / self._total(event, "seconds") for event in seen)

    def _total(self, event: Mapping[str, Any], figure: str) -> float:
        # Under HYBRID_SHARD over nodes, only the all-reduce of the copies leaves a node.
        kinds = ("all_reduce",) if self._is_hybrid else KINDS
        return float(sum(number(event.get(f"{kind}_{figure}")) or 0.0 for kind in kinds))

    @property
    def _is_hybrid(self) -> bool:
        return self.layout.strategy == "HYBRID_SHARD" and self.hardware.nodes > 1

    def _advice(self, share: float, step: float, rate: float, *, held_gib: float, peak_gib: float) -> str:
        """The layout that would communicate least, of those that fit, and the seconds of a step in it.

        Args:
            share: of a step's seconds, that it waits. step: its seconds. rate: GB/s that each rank sends.
            held_gib: parameters, gradients and optimizer states of a rank. peak_gib: the most that it had allocated.
        """
        # The copies of all ranks of a node are reduced at once, over the node's one link.
        rate *= min(self.layout.mesh_shape[1], self.hardware.cards_per_node) if self._is_hybrid else 1
        now = self._seconds(self.layout.strategy, self.layout.mesh_shape[1], rate)
        found = {
            strategy: self._seconds(strategy, group_size, rate)
            for strategy, group_size in self._others()
            if self._has_room(strategy, group_size, held_gib, peak_gib)
        }
        best = min(found, key=lambda strategy: found[strategy], default="")
        # Assumed: computing hides the same fraction of communication as now.
        foreseen = step * (1 - share * (1 - found[best] / now)) if best and now else step
        if step < _WORTH_SAYING * foreseen:
            return (
                "communication: no other layout that fits would make steps much faster; larger micro-batches "
                "(--batch_size_training), or more of them in a step, communicate less per token"
            )
        return (
            f"communication: {_FLAGS[best]} would communicate {now / found[best]:.1f} times less, and should fit: "
            f"about {foreseen:.3g} s a step, {step / foreseen:.1f} times faster"
        )

    def _others(self) -> list[tuple[str, int]]:
        """The other layouts, and how many ranks share a copy of the model in each."""
        hardware = self.hardware
        sizes = {"FULL_SHARD": hardware.world_size, "SHARD_GRAD_OP": hardware.world_size, "NO_SHARD": 1}
        if hardware.nodes > 1 and hardware.cards_per_node > 1:
            sizes["HYBRID_SHARD"] = hardware.cards_per_node
        return [(strategy, size) for strategy, size in sizes.items() if strategy != self.layout.strategy]

    def _seconds(self, strategy: str, group_size: int, rate: float) -> float:
        """Seconds of communication in a step, hidden or not, if a node sends `rate` GB/s."""
        traffic = self.traffic
        if strategy == "NO_SHARD":
            traffic = replace(traffic, reduces_once=traffic.all_reduces_once)
        return seconds_per_step(strategy, traffic, self._speeds(group_size, rate))

    def _speeds(self, group_size: int, rate: float) -> Speeds:
        hardware, world_size = self.hardware, self.hardware.world_size
        if hardware.nodes == 1:
            sizes = world_size, group_size, world_size // group_size
            speeds: Speeds | None = Speeds(*(_group_speeds(size, rate) for size in sizes))
        else:
            # Links inside a node whose rate is not known count as infinitely fast: the network is slower.
            card = replace(hardware.card, peer_gb_per_second=hardware.card.peer_gb_per_second or math.inf)
            speeds = expected_speeds(replace(hardware, card=card, network_gbps=8 * rate), group_size)
        assert speeds is not None
        return speeds if hardware.card.is_gpu else Speeds(*map(_of_gloo, (speeds.world, speeds.node, speeds.between)))

    def _has_room(self, strategy: str, group_size: int, held_gib: float, peak_gib: float) -> bool:
        """Whether a rank has memory for its part of the model and everything else that it held at its peak."""
        layout = self.layout
        # Offloaded weights are in host memory, of which these figures say nothing.
        if layout.cpu_offload:
            return False
        needed = peak_gib - held_gib + held_gib * layout.mesh_shape[1] / group_size
        if strategy == "SHARD_GRAD_OP":
            needed += self.traffic.units_bytes / GIB  # gathered from forward to backward
        return needed <= _ROOM_SHARE * self.hardware.card.memory_gib


def _group_speeds(size: int, rate: float) -> GroupSpeeds:
    once = Speed(0.0, (size - 1) / size / (1e9 * rate))
    return GroupSpeeds(size, once, once, Speed(0.0, 2 * once.seconds_per_byte))


def _of_gloo(speeds: GroupSpeeds) -> GroupSpeeds:
    """The same over gloo, whose reduce-scatter reduces on all ranks, each of which keeps its part."""
    return replace(speeds, reduce_scatter=speeds.all_reduce)


def _held_gib(events: Iterable[Mapping[str, Any]]) -> float:
    """The most that parameters, gradients and optimizer states of any rank took together."""
    parts = ("params_gib", "grads_gib", "optimizer_gib")
    held = (sum(number(e.get(part)) or 0.0 for part in parts) for e in events if e["event"] == "memory")
    return max(held, default=0.0)
