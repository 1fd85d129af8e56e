"""Workarounds for other libraries' versions, each with the version that ends it."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def enable_activation_checkpointing(model: Any) -> None:
    """Checkpoint every layer of a transformers model, without re-entrant autograd.

    transformers 5.20 or so renamed `gradient_checkpointing_enable`; the old name goes in v6. Ends when
    requirements.txt asks for a version that has `activation_checkpointing_enable`.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def no_buffer_sync() -> dict[str, Any]:
    """The option of DistributedDataParallel that leaves buffers alone in forward.

    torch 2.13 renamed `broadcast_buffers` to `forward_sync_buffers`. Ends when requirements.txt asks for torch 2.13.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
