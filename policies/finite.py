"""Which of a model's weights are not finite; looked for only after a loss that is not."""

from __future__ import annotations

import torch
from torch import nn

from policies.sharding import unwrap
from policies.weights.tensor_names import plain_name
from utils.local_tensors import local_tensor


@torch.no_grad()
def weights_not_finite(model: nn.Module) -> dict[str, bool]:
    """This rank's parameters and buffers that hold NaN, or parameters with an infinity: whether each is trained.

    They are named as in the model without adapters. A buffer may hold infinities, as masks do.
    """
    inner = unwrap(model)
    found = {}
    for name, parameter in inner.named_parameters():
        if not local_tensor(parameter).isfinite().all():
            found[plain_name(name).removeprefix("base_model.model.")] = parameter.requires_grad
    for name, buffer in inner.named_buffers():
        if local_tensor(buffer).isnan().any():
            found[plain_name(name).removeprefix("base_model.model.")] = False
    return found
