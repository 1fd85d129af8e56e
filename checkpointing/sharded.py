"""The sharded copy of the trained state that `--dist_checkpoint_root_folder` asks for at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from checkpointing.export import keep_trained
from policies.sharding import unwrap


def save_sharded(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Every rank writes its own shards; the file COMPLETE says that all of them are there.

    Trained parameters only, so the copy of an adapter is as small as the adapter. Every rank must call this.

    Args:
        optimizer: its states are written too; None leaves them out (`--save_optimizer False`).
    """
    options = StateDictOptions(ignore_frozen_params=True)
    inner = unwrap(model)
    state: dict[str, Any] = {"model": keep_trained(inner, get_model_state_dict(inner, options=options))}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(inner, optimizer, options=options)
    marker = folder / "COMPLETE"
    if dist.get_rank() == 0:
        marker.unlink(missing_ok=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        marker.touch()
