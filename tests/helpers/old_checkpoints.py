"""Checkpoints as versions before safetensors wrote them: torch.distributed.checkpoint, or torch.save; a pickled rng."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpointing.random_states import find_rng_file, parse_rng_file
from checkpointing.tensor_files import TensorFiles
from run_folder.checkpoint_folder import FULL_FILE, tensor_files
from tests.helpers.checkpoints import complete

OLD_SCHEDULER = {"base_lrs": [5e-3], "_step_count": 4, "_is_initial": False, "_last_lr": [5e-3], "lr_lambdas": [None]}
"""The state of transformers' scheduler, besides `last_epoch`."""


def nested(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors as torch's planner got them; it joins the keys again."""
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            state["model"][rest] = tensor
        else:
            parameter, _, key = rest.removeprefix("state.").rpartition(".")
            state["optimizer"]["state"].setdefault(parameter, {})[key] = tensor
    return state


def write_as_before(folder: str) -> None:
    """Replace what is in a checkpoint's folder by what an earlier version wrote. To be run on its ranks."""
    dist.init_process_group("gloo")
    path, rank, mesh = Path(folder), dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    files = TensorFiles(tensor_files(path))
    tensors = {name: files.read(name) for name in files.kinds}
    rng = find_rng_file(path, rank)
    assert rng is not None
    torch.save(parse_rng_file(rng), path / f"rng-{rank:05d}.pt")
    if (path / FULL_FILE).is_file():
        if rank == 0:
            torch.save(tensors, path / "state.pt")
    else:
        dcp.save(
            nested({n: distribute_tensor(t, mesh, [Shard(0)]) if t.dim() else t for n, t in tensors.items()}),
            checkpoint_id=path,
        )
    dist.barrier()
    if rank == 0:
        for new in (*tensor_files(path), *path.glob("rng-*.json")):
            new.unlink()
        values = json.loads((path / "state.json").read_text())
        del values["format"], values["epochs"]
        values["scheduler"] = {**OLD_SCHEDULER, "last_epoch": values["state"]["step"]}
        (path / "state.json").write_text(json.dumps(values))
        complete(path)
