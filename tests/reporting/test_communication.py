"""What a step waits for other ranks: against a simulated device's idle time, and between real processes."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reporting.collective_timeline
from policies.direct_transfers import send_directly
from ranks.environment import read_environment
from ranks.process_group import start_process_group
from reporting.collective_timeline import DeviceClock, HostClock, WatchedUnits
from reporting.communication import FIRST_MEASURED, CommunicationRecorder
from tests.helpers.processes import ProcessGroup
from tests.helpers.replicas import stop_group_after_replicas
from tests.helpers.simulated_device import SimulatedDevice, Working, simulated_ranks

COMPUTING = 1.0  # seconds of a layer's forward
SLOW = {"all_gather": 4.0, "reduce_scatter": 5.0, "all_reduce": 3.0}
MIXED = {"all_gather": 0.25, "reduce_scatter": 2.5, "all_reduce": 0.5}


def sharded_layers(device: SimulatedDevice, mesh_shape: tuple[int, int], frozen: tuple[int, ...] = ()) -> nn.Module:
    model = nn.Sequential(*(Working(device, COMPUTING, is_frozen=index in frozen) for index in range(4)))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    mesh = mesh["shard"] if mesh_shape[0] == 1 else mesh
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def train_step(model: nn.Module, num_micro_batches: int = 2, *, accumulate_unsharded: bool = False) -> None:
    for index in range(num_micro_batches):
        is_last = index == num_micro_batches - 1
        model.set_requires_gradient_sync(is_last or not accumulate_unsharded)
        model.set_requires_all_reduce(is_last)
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("is_direct", [False, True], ids=["packed", "direct"])
@pytest.mark.parametrize("accumulate_unsharded", [False, True], ids=["reduced-each-time", "reduced-once"])
@pytest.mark.parametrize("frozen", [(), (1, 2)], ids=["all-trained", "some-frozen"])
@pytest.mark.parametrize("mesh_shape", [(1, 4), (2, 2), (4, 1)], ids=["full", "hybrid", "copies"])
@pytest.mark.parametrize("seconds", [SLOW, MIXED], ids=["slow", "mixed"])
def test_what_is_measured_on_a_device_is_how_long_it_computed_nothing(
    seconds: dict[str, float],
    mesh_shape: tuple[int, int],
    frozen: tuple[int, ...],
    *,
    accumulate_unsharded: bool,
    is_direct: bool,
) -> None:
    with simulated_ranks(4, seconds) as device:
        model = sharded_layers(device, mesh_shape, frozen)
        if is_direct:
            send_directly(model)
        units = WatchedUnits(model, DeviceClock(device.Event))
        train_step(model, accumulate_unsharded=accumulate_unsharded)  # not recorded
        began, idle_before = device.computing.time, device.computing.idle_seconds
        with units.recording() as timeline:
            train_step(model, accumulate_unsharded=accumulate_unsharded)
        idle = device.computing.idle_seconds - idle_before
        assert idle == pytest.approx(device.computing.time - began - 2 * 4 * 3 * COMPUTING)
        assert sum(timeline.exposed_seconds()) == pytest.approx(idle, abs=1e-9)
        for collective, took in zip(timeline.collectives, timeline.collective_seconds(), strict=True):
            assert took == pytest.approx(seconds[collective.kind])
    assert idle >= seconds["all_reduce" if mesh_shape[0] > 1 else "reduce_scatter"], "of the last reduction"


LATE_SECONDS = 1.0
GATHER_SECONDS = 0.1


def measured_on_ranks(path: Path, layout: str, last: int, *, is_late: bool, is_slow: bool) -> None:
    """Write what rank 0 finds of each step. Rank 1 is late in the last one, or gathering is slow on all ranks."""
    env = read_environment()
    start_process_group(env)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    if layout == "ddp":
        model = DistributedDataParallel(layers)
    else:
        model = fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
    gather = reporting.collective_timeline.all_gather
    if is_slow:

        def slow_gather(*args, **kwargs):
            time.sleep(GATHER_SECONDS)
            return gather(*args, **kwargs)

        reporting.collective_timeline.all_gather = slow_gather
    recorder, found = CommunicationRecorder(model, HostClock()), []
    for step in range(1, last + 1):
        with recorder.step() as measured:
            loss = model(torch.ones(2, 64)).sum()
            if is_late and env.rank == 1 and step == last:
                time.sleep(LATE_SECONDS)
            loss.backward()
        found.append(measured.figures() if measured else {})
    del model, layers, loss, recorder
    stop_group_after_replicas()
    if env.is_rank_zero:
        path.write_text(json.dumps(found))


@pytest.mark.parametrize("last", [FIRST_MEASURED[0], FIRST_MEASURED[-1]], ids=["first", "later"])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_waiting_for_a_slower_rank_is_not_waiting_for_the_network(
    layout: str, last: int, process_group: ProcessGroup, tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    process_group.train(partial(measured_on_ranks, path, layout, last, is_late=True, is_slow=False), 2)
    figures = json.loads(path.read_text())
    assert [step for step, of_step in enumerate(figures, 1) if of_step] == [s for s in FIRST_MEASURED if s <= last]
    found = figures[-1]
    assert found["straggler_seconds"] > 0.7 * LATE_SECONDS
    assert found["exposed_seconds"] < 0.5 * LATE_SECONDS
    kind = "reduce_scatter" if layout == "fsdp" else "all_reduce"
    num_elements = 3 * (64 * 64 + 64)  # of 4 bytes: each of two sends half to reduce them, half to have them all
    assert found[f"{kind}_sent_gb"] == pytest.approx(4 * num_elements / 1e9)


def test_a_slow_collective_is_what_every_rank_waits_for(process_group: ProcessGroup, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    process_group.train(partial(measured_on_ranks, path, "fsdp", FIRST_MEASURED[0], is_late=False, is_slow=True), 2)
    found = json.loads(path.read_text())[-1]
    assert GATHER_SECONDS <= found["all_gather_seconds"] <= found["exposed_seconds"]
    assert found["straggler_seconds"] < found["exposed_seconds"]
