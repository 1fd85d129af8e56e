"""Tensors sharded unevenly and saved by several processes, as earlier versions did and as this one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from checkpointing.tensor_files import parts_to_write, write_tensors
from run_folder.checkpoint_folder import shard_file

SHARDED = ((0, 7), (1, 5), (0, 2))  # dimension that is cut, number of rows


def whole(rows: int) -> torch.Tensor:
    return torch.arange(rows * 5.0 * rows).reshape(rows, 5 * rows)


def save_shards(folder: str) -> None:
    """One rank's part, to be run on several."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(world_size))
    state: dict[str, Any] = {"model.same": torch.arange(4.0)}
    for dim, rows in SHARDED:
        tensor = whole(rows)
        parts = tensor.chunk(world_size, dim)
        local = parts[rank] if rank < len(parts) else tensor.narrow(dim, 0, 0)
        sharded = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], shape=tensor.shape, stride=tensor.stride())
        state[f"model.w{dim}{rows}"] = sharded
    dcp.save(state, checkpoint_id=f"{folder}/distcp")
    (Path(folder) / "safetensors").mkdir(exist_ok=True)
    write_tensors(Path(folder) / "safetensors" / shard_file(rank), parts_to_write(state))
