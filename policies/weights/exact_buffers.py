"""Buffers that must not be rounded, read again where transformers has rounded them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from policies.weights.stored import SafetensorsTensors, weight_files
from utils.compat import must_be_exact


def read_exact_buffers(model: PreTrainedModel, model_name: str) -> None:
    """Give the buffers that stay in fp32 the values that the files hold. Files may call them otherwise.

    Args:
        model: as `from_pretrained` read it, in a dtype that may have rounded them.
        model_name: folder or hub name.
    """
    rounded = {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != torch.float32 and must_be_exact(model, name)
    }
    if not rounded:
        return
    files = SafetensorsTensors(weight_files(model_name))
    for name, buffer in rounded.items():
        (stored_as,) = revert_weight_conversion(model, {name: buffer})
        if stored_as in files.index:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, files.read(stored_as).float())
