"""The private calls of torch.distributed that the project makes, in one place.

They stand in utils/ because both the process group (utils/distributed.py) and the watchdog (supervision/) need them,
and utils/ imports nothing of ours. Look here first if a new version of torch breaks a run's start or its supervision.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process, those of device meshes included."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the collectives of a group that exists already wait for so long."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def num_entered(group: dist.ProcessGroup) -> int:
    """How many collectives of the group this rank has entered. Any thread may ask."""
    total = 0
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        total += backend._get_sequence_number_for_group()
    return total


def recorded_collectives() -> dict[str, bytes]:
    """What torch's flight recorder holds of the last collectives, by backend.

    "nccl" is a pickle, as `torchfrtrace` reads it; "gloo" is JSON. A build without NCCL has no first one.
    """
    dumps = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace_json"}
    traces = {backend: getattr(c10d, name)() for backend, name in dumps.items() if hasattr(c10d, name)}
    return {name: trace.encode() if isinstance(trace, str) else trace for name, trace in traces.items()}
