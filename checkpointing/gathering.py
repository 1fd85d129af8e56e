"""Whole tensors in rank 0's host memory, gathered one at a time from a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing.trained import saved_tensors
from policies.adapters.adapted_model import has_adapter
from policies.sharding import unwrap
from policies.weights.tensor_names import shared_names


def gather_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of each whole tensor on rank 0, nothing on the others. Every rank must call this."""
    is_rank_zero, whole = dist.get_rank() == 0, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            # Shards may be in host memory, where the mesh's backend gathers nothing.
            tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
        if is_rank_zero:
            # A copy: on a CPU this would be the parameter itself, which training goes on to change.
            whole[name] = tensor.to("cpu", copy=True)
    return whole


def gathered_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict to save, whole on rank 0 and empty on the others; if the model has adapters, theirs alone.

    Every rank must call this. Tied weights are one tensor, as in a plain state_dict, so that they are saved once.
    """
    inner = unwrap(model)
    whole = gather_to_host(saved_tensors(inner))
    if has_adapter(inner) or not whole:
        return whole
    first_names = {name: names[0] for names in shared_names(inner) for name in names}
    return {name: whole[first_names.get(name, name)] for name in inner.state_dict()}
