"""This rank's part of a tensor that may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded, as a plain tensor."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "fsdp_pre_all_gather"):  # a subclass that FSDP gathers in another form, such as float8
        (name, *_), _ = local.detach().__tensor_flatten__()  # type: ignore[attr-defined]
        local = getattr(local, name)
    return local


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and sharding, detached and in the stored form, also if FSDP gathers another one."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor) or not hasattr(tensor.to_local(), "fsdp_pre_all_gather"):
        return tensor
    return DTensor.from_local(
        local_tensor(tensor),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
