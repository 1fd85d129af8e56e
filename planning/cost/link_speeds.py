"""How fast ranks exchange tensors: over all of them, inside a node, and between nodes. Measured, or from datasheets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planning.hardware import Hardware

LINK_SHARE = {"NVLink": 0.8, "Infinity Fabric": 0.8, "PCIe": 0.76}
"""What collectives reach of a link's rate. NCCL counts with 20 of 25 GB/s per NVLink and 12 of 15.75 GB/s per PCIe 3.0
x16 (NVIDIA/nccl, src/graph/topo.h). Infinity Fabric: taken as NVLink."""

# Seconds of a collective before bytes count, and of each step of a ring or tree, inside a node and between nodes: those
# that NCCL counts with for its Simple protocol (NVIDIA/nccl, src/graph/tuning.cc).
_BASE_SECONDS = 8.4e-6
_RING_SECONDS = {"NVLink": 3.4e-6, "Infinity Fabric": 3.4e-6, "PCIe": 5.7e-6, "network": 9.6e-6}
_TREE_SECONDS = {"node": 28e-6, "network": 50e-6}


@dataclass(frozen=True)
class Speed:
    """The time of a collective is `latency_seconds` plus `seconds_per_byte` for each byte of the whole tensor."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float, num_calls: float) -> float:
        return num_calls * self.latency_seconds + num_bytes * self.seconds_per_byte

    @property
    def gigabytes_per_second(self) -> float:
        return 1e-9 / self.seconds_per_byte


@dataclass(frozen=True)
class GroupSpeeds:
    """Of the collectives of one kind of group. All groups of the kind work at once, as in a step."""

    size: int
    all_gather: Speed
    reduce_scatter: Speed
    all_reduce: Speed


@dataclass(frozen=True)
class Speeds:
    world: GroupSpeeds
    node: GroupSpeeds  # the ranks of one node
    between: GroupSpeeds  # the ranks with the same number on each node


def expected_speeds(hardware: Hardware, sharding_group_size: int | None = None) -> Speeds | None:
    """The speeds that such hardware should have; None if a rate is not known.

    A ring over n ranks sends (n - 1) / n of a gathered or scattered tensor over each link, also over each node's to the
    next, and twice that of a tensor that is reduced on all ranks. A tree reduces the latency of all-reduce only.

    Args:
        sharding_group_size: of HYBRID_SHARD: its groups take the place of nodes, and its copies that of `between`.
    """
    card, per_node, nodes = hardware.card, hardware.cards_per_node, hardware.nodes
    if (per_node > 1 and card.peer_gb_per_second is None) or (nodes > 1 and hardware.network_gbps is None):
        return None
    link = next((kind for kind in LINK_SHARE if (card.peer_link or "").startswith(kind)), "PCIe")
    inside = 1e-9 / (LINK_SHARE[link] * (card.peer_gb_per_second or math.inf))
    network = 8e-9 / (hardware.network_gbps or math.inf)

    def group(size: int, spanned: int, num_sharing: int = 1) -> GroupSpeeds:
        """Of `size` ranks on `spanned` nodes, if so many groups share each node's link to the others."""
        if size == 1:
            return GroupSpeeds(1, *[Speed(0.0, 0.0)] * 3)
        hops = (size - spanned) * _RING_SECONDS[link] + (spanned - 1) * _RING_SECONDS["network"]
        tree = (size / spanned - 1) * _TREE_SECONDS["node"] + math.log2(spanned) * _TREE_SECONDS["network"]
        per_link = max(inside if size > spanned else 0.0, num_sharing * network if spanned > 1 else 0.0)
        share = (size - 1) / size * per_link
        once = Speed(_BASE_SECONDS + hops, share)
        return GroupSpeeds(size, once, once, Speed(_BASE_SECONDS + 2 * min(hops, tree), 2 * share))

    sharded = sharding_group_size or per_node
    copies = hardware.world_size // sharded
    spanned_by_group = max(1, sharded // per_node)
    return Speeds(
        world=group(hardware.world_size, nodes),
        node=group(sharded, spanned_by_group),
        between=group(copies, min(copies, nodes // spanned_by_group), min(sharded, per_node)),
    )


def network_gbps(world: GroupSpeeds) -> float:
    """The rate of a node's link to the others that explains a measured all-gather over nodes: for --network_gbps."""
    return 8e-9 * (world.size - 1) / world.size / world.all_gather.seconds_per_byte
