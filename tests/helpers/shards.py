"""Tensors sharded unevenly and saved by several processes; apart, so that these import nothing but torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

SHARDED = ((0, 7), (1, 5), (0, 2))  # dimension that is cut, number of rows


def whole(rows: int) -> torch.Tensor:
    return torch.arange(rows * 5.0 * rows).reshape(rows, 5 * rows)


def save_shards(rank: int, world_size: int, folder: str, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = DeviceMesh("cpu", torch.arange(world_size))
    state: dict[str, Any] = {"model.same": torch.arange(4.0)}
    for dim, rows in SHARDED:
        tensor = whole(rows)
        parts = tensor.chunk(world_size, dim)
        local = parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)
        sharded = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], shape=tensor.shape, stride=tensor.stride())
        state[f"model.w{dim}{rows}"] = sharded
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()
