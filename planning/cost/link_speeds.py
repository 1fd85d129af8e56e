"""How fast ranks exchange tensors: over all of them, inside a node, and between nodes. Measured, or from datasheets."""

from __future__ import annotations

import math

from planning.machines.group_speeds import GroupSpeeds, Speed, Speeds
from planning.machines.hardware import Hardware

LINK_SHARE = {"NVLink": 0.8, "Infinity Fabric": 0.8, "PCIe": 0.76}
"""The fraction of a link's rate that collectives reach. NCCL counts with 20 of 25 GB/s per NVLink and 12 of 15.75 GB/s
per PCIe 3.0 x16 (NVIDIA/nccl, src/graph/topo.h). Infinity Fabric: taken as NVLink."""

# Seconds of a collective before bytes count, and of each step of a ring or tree, inside a node and between nodes: those
# that NCCL counts with for its Simple protocol (NVIDIA/nccl, src/graph/tuning.cc).
_BASE_SECONDS = 8.4e-6
_RING_SECONDS = {"NVLink": 3.4e-6, "Infinity Fabric": 3.4e-6, "PCIe": 5.7e-6, "network": 9.6e-6}
_TREE_SECONDS = {"node": 28e-6, "network": 50e-6}


def expected_speeds(hardware: Hardware, sharding_group_size: int | None = None) -> Speeds | None:
    """The speeds that such hardware has; None if a rate is not known.

    They are those that tools.doctor measured, if it did. For other numbers of the same machines, or for groups other
    than a node's ranks, links count with their measured rates.

    A ring over n ranks sends (n - 1) / n of a gathered or scattered tensor over each link, also over each node's to the
    next, and twice that of a tensor that is reduced on all ranks. A tree reduces the latency of all-reduce only.

    Args:
        sharding_group_size: of HYBRID_SHARD: its groups take the place of nodes, and its copies that of `between`.
    """
    card, per_node, nodes, measured = hardware.card, hardware.cards_per_node, hardware.nodes, hardware.measured
    shape = (hardware.world_size, per_node, sharding_group_size or per_node)
    if measured is not None and shape == (measured.world.size, measured.node.size, measured.node.size):
        return measured
    link = next((kind for kind in LINK_SHARE if (card.peer_link or "").startswith(kind)), "PCIe")
    in_node = None if card.peer_gb_per_second is None else 1e-9 / (LINK_SHARE[link] * card.peer_gb_per_second)
    to_others = None if hardware.network_gbps is None else 8e-9 / hardware.network_gbps
    if measured is not None and measured.node.size > 1:
        in_node = seconds_per_link_byte(measured.node)
    if measured is not None and measured.between.size > 1:
        to_others = seconds_per_link_byte(measured.world)
    if (per_node > 1 and in_node is None) or (nodes > 1 and to_others is None):
        return None
    inside, network = in_node or 0.0, to_others or 0.0

    def group(size: int, spanned: int, num_sharing: int = 1) -> GroupSpeeds:
        """Speeds of `size` ranks on `spanned` nodes, if `num_sharing` groups share each node's link to the others."""
        if size == 1:
            return GroupSpeeds(1, *[Speed(0.0, 0.0)] * 3)
        hops = (size - spanned) * _RING_SECONDS[link] + (spanned - 1) * _RING_SECONDS["network"]
        tree = (size / spanned - 1) * _TREE_SECONDS["node"] + math.log2(spanned) * _TREE_SECONDS["network"]
        # A ring is as slow as its slowest link.
        per_link = max(inside if size > spanned else 0.0, num_sharing * network if spanned > 1 else 0.0)
        share = (size - 1) / size * per_link
        once = Speed(_BASE_SECONDS + hops, share)
        # All-reduce sends each byte twice, and NCCL takes the ring or the tree, whichever starts sooner.
        return GroupSpeeds(size, once, once, Speed(_BASE_SECONDS + 2 * min(hops, tree), 2 * share))

    sharded = sharding_group_size or per_node
    copies = hardware.world_size // sharded
    spanned_by_group = max(1, sharded // per_node)
    return Speeds(
        world=group(hardware.world_size, nodes),
        node=group(sharded, spanned_by_group),
        between=group(copies, min(copies, nodes // spanned_by_group), min(sharded, per_node)),
    )


def seconds_per_link_byte(group: GroupSpeeds) -> float:
    """Seconds per byte on the slowest link of a group, from a measured all-gather."""
    return group.all_gather.seconds_per_byte * group.size / (group.size - 1)


def network_gbps(world: GroupSpeeds) -> float:
    """The rate of a node's link to the others that explains a measured all-gather over nodes: for --network_gbps."""
    return 8e-9 / seconds_per_link_byte(world)
