"""What the end of a run says of steps that waited for the network."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from planning.cost.network_waits import RunNetwork
from planning.cost.traffic import Traffic
from planning.machines.cards import find_card
from planning.machines.hardware import Hardware
from policies.sharding import Layout

H200 = find_card("H200")
assert H200 is not None
NODES = Hardware(H200, cards_per_node=8, nodes=2)
ONE_NODE = replace(NODES, nodes=1)
FULL = Layout("fully_shard", "FULL_SHARD", (1, 16), reshard_after_forward=True)
WEIGHTS = 16e9  # bytes of 8B's, in bf16
TRAFFIC = Traffic(
    units_bytes=int(WEIGHTS),
    root_bytes=0,
    gradient_bytes=int(2 * WEIGHTS),
    num_units=33,
    num_trained_units=33,
    num_micro_batches=1,
    reduces_once=True,
)
ROOM = [60.0]  # GiB that each rank had allocated, of 139.8


def run_of(
    network: RunNetwork, *, gigabits: float, exposed: float, step_seconds: float = 10.0, held_gib: float = 5.0
) -> list[dict[str, Any]]:
    """The events of a run whose ranks send so fast, and whose steps wait for so long."""
    hybrid = network.layout.strategy == "HYBRID_SHARD"
    sent = {"all_gather": 30.0, "reduce_scatter": 30.0, "all_reduce": 4.0 if hybrid else 0.0}
    # Inside a node it is a hundred times faster.
    seconds = {kind: 8 * gb / gigabits / (100 if hybrid and kind != "all_reduce" else 1) for kind, gb in sent.items()}
    figures = {f"{kind}_seconds": seconds[kind] for kind in sent} | {f"{kind}_sent_gb": sent[kind] for kind in sent}
    events: list[dict[str, Any]] = [{"event": "memory", "params_gib": held_gib, "grads_gib": 0, "optimizer_gib": 0}]
    for step in range(1, 6):
        events.append({"event": "train", "step": step, "step_seconds": step_seconds})
        if step >= 3:
            events.append({"event": "communication", "step": step, "exposed_seconds": exposed, **figures})
    return events


def test_the_share_the_bandwidth_and_the_layout_are_said() -> None:
    network = RunNetwork(FULL, TRAFFIC, NODES)
    first, second = network.lines(run_of(network, gigabits=80, exposed=6.0), ROOM)
    assert first == (
        "communication: a step waits 60 % of its time for tensors of other ranks (6 of 10 s, median of 3 measured "
        "steps); each rank sends 80 Gbit/s meanwhile"
    )
    # FULL_SHARD: 64 GB x 15/16 over 10 GB/s = 6 s. Between nodes, groups of 8 reduce 32 GB once: 3.2 s over the network
    # (each of 8 ranks 4 GB x 2 x 1/2), and inside a node 64 GB x 7/8 over 360 GB/s = 0.16 s.
    times, step, faster = re.findall(r"([\d.]+) times less.* about ([\d.]+) s a step, ([\d.]+) times faster", second)[0]
    assert second.startswith("communication: --hsdp")
    assert float(times) == pytest.approx(6.0 / 3.36, rel=0.05)
    assert float(step) == pytest.approx(10 - 6 * (1 - 3.36 / 6), rel=0.02)
    assert float(faster) == pytest.approx(10 / float(step), rel=0.05)


def test_nothing_is_said_of_a_network_that_is_not_what_steps_wait_for() -> None:
    network = RunNetwork(FULL, TRAFFIC, NODES)
    assert network.lines(run_of(network, gigabits=80, exposed=3.3), ROOM) == []
    unmeasured = [event for event in run_of(network, gigabits=80, exposed=6.0) if event["event"] != "communication"]
    assert network.lines(unmeasured, ROOM) == []


def test_steps_of_which_figures_are_missing_are_left_out() -> None:
    network = RunNetwork(FULL, TRAFFIC, NODES)
    whole = run_of(network, gigabits=80, exposed=6.0)
    step = {"event": "communication", "step": 6}
    missing = [{"event": "train", "step": 6}, step, {"event": "train", "step": 7, "step_seconds": 1.0}]
    missing += [step | {"step": 7}, {"event": "memory", "step": 6}]
    assert network.lines([*whole, *missing], ROOM) == network.lines(whole, ROOM)


def test_what_an_earlier_session_waited_for_does_not_count() -> None:
    """A run that goes on in one process still has the events of its sixteen ranks."""
    network = RunNetwork(FULL, TRAFFIC, NODES)
    earlier = [{"event": "start"}, *run_of(network, gigabits=80, exposed=6.0), {"event": "start"}]
    alone = RunNetwork(replace(FULL, mesh_shape=(1, 1)), TRAFFIC, replace(NODES, nodes=1, cards_per_node=1))
    assert alone.lines(earlier, ROOM) == []
    assert alone.lines([*earlier, {"event": "train", "step": 6, "step_seconds": 1.0}], ROOM) == []


def test_a_layout_that_does_not_fit_is_not_advised() -> None:
    """Of FULL_SHARD over 16, a rank holds a sixteenth; the weights of all layers are 15 GiB, and few are trained."""
    lone_cards = replace(NODES, cards_per_node=1, nodes=16)
    network = RunNetwork(FULL, replace(TRAFFIC, gradient_bytes=4 * 10**9, num_micro_batches=16), lone_cards)

    def advice(held_gib: float, peak_gib: float) -> str:
        return network.lines(run_of(network, gigabits=80, exposed=6.0, held_gib=held_gib), [peak_gib])[1]

    assert "--sharding_strategy NO_SHARD would" in advice(1.0, 60.0), "60 - 1 + 16 GiB fit"
    assert "--sharding_strategy SHARD_GRAD_OP would" in advice(9.0, 60.0), "60 - 9 + 144 GiB do not, 60 + 15 do"
    nothing = advice(9.0, 130.0)
    assert "no other layout that fits" in nothing
    assert "--batch_size_training" in nothing


def test_groups_whose_copies_are_reduced_over_the_network_are_judged_by_that() -> None:
    """What eight ranks send at once, each at 10 Gbit/s, is the rate of a node's link."""
    hybrid = RunNetwork(Layout("fully_shard", "HYBRID_SHARD", (2, 8), reshard_after_forward=True), TRAFFIC, NODES)
    first, second = hybrid.lines(run_of(hybrid, gigabits=10, exposed=6.0), ROOM)
    assert "each rank sends 10 Gbit/s" in first
    assert "no other layout that fits" in second


def test_ranks_of_one_node_are_advised_by_the_bytes_alone() -> None:
    """FULL_SHARD gathers twice and reduces once, in fp32: 4 parts. SHARD_GRAD_OP does with 3; NO_SHARD reduces 4."""
    network = RunNetwork(replace(FULL, mesh_shape=(1, 8)), TRAFFIC, ONE_NODE)
    _, line = network.lines(run_of(network, gigabits=80, exposed=8.0), ROOM)
    assert "--sharding_strategy SHARD_GRAD_OP would communicate 1.3 times less" in line
    offloaded = replace(network, layout=replace(network.layout, cpu_offload=True))
    _, line = offloaded.lines(run_of(offloaded, gigabits=80, exposed=8.0), ROOM)
    assert "no other layout that fits" in line, "what the host has room for is not known"
