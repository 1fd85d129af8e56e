"""How fast the ranks exchange tensors: over all of them, inside a node, and between nodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from planning.machines.group_speeds import GroupSpeeds, Speed, Speeds
from ranks.environment import Environment
from utils.compat import all_gather, reduce_scatter

_SMALL_BYTES = 1 << 16
_LARGE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 21}
_REPEATS = 3

Collective = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]


def _all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    all_gather(whole, part, group)


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter(part, whole, group)


def _all_reduce(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(whole, group=group)


def measure_speeds(env: Environment) -> Speeds:
    """Measure; every rank must call this, and every node must have as many ranks."""
    shape = (env.world_size // env.local_world_size, env.local_world_size)
    mesh = init_device_mesh(env.device.type, shape, mesh_dim_names=("between", "node"))
    world = dist.group.WORLD
    assert world is not None
    groups = {"world": world, "node": mesh["node"].get_group(), "between": mesh["between"].get_group()}
    return Speeds(**{name: _measure_group(group, env.device) for name, group in groups.items()})


def _measure_group(group: dist.ProcessGroup, device: torch.device) -> GroupSpeeds:
    size = dist.get_world_size(group)
    speeds = {
        name: _measure(collective, group, size, device)
        for name, collective in (
            ("all_gather", _all_gather),
            ("reduce_scatter", _reduce_scatter),
            ("all_reduce", _all_reduce),
        )
    }
    return GroupSpeeds(size=size, **speeds)


def _measure(collective: Collective, group: dist.ProcessGroup, size: int, device: torch.device) -> Speed:
    small, large = (
        _median_seconds(collective, group, size, device, num_bytes)
        for num_bytes in (_SMALL_BYTES, _LARGE_BYTES[device.type])
    )
    # Over a fast link noise may make the large transfer the faster one; 1e-13 is ten terabytes per second.
    per_byte = max(1e-13, (large - small) / (_LARGE_BYTES[device.type] - _SMALL_BYTES))
    return Speed(max(0.0, small - _SMALL_BYTES * per_byte), per_byte)


def _median_seconds(
    collective: Collective, group: dist.ProcessGroup, size: int, device: torch.device, num_bytes: int
) -> float:
    """The median over some repetitions of the slowest rank's time."""
    part = torch.zeros(num_bytes // 4 // size, device=device)
    whole = torch.zeros(part.numel() * size, device=device)
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one connects, and does not count
        dist.barrier()
        _wait_for(device)
        started = time.perf_counter()
        collective(whole, part, group)
        _wait_for(device)
        took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        seconds.append(took.item())
    return statistics.median(seconds[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
