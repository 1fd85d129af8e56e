"""What tells whether a base model is the one that a checkpoint was trained on, without reading all of it."""

from __future__ import annotations

from torch import nn

from configs.training import TrainConfig
from policies.weights.fingerprint import fingerprint_files
from policies.weights.stored import weight_files
from utils.parameters import packed_weights


def base_fingerprint(model: nn.Module, train: TrainConfig) -> str | None:
    """A digest of the weights that the run does not train and so does not save; None if it trains all of them."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return None
    # Random weights are in no file; they follow from the seed.
    return f"random {train.seed}" if train.random_weights else fingerprint_files(weight_files(train.model_name))


def num_packed_weights(model: nn.Module) -> dict[str, int] | None:
    """How many weights of linear layers and of experts are in 4 or 8 bits; None if the base is not quantized.

    The flags do not say it: which layers --quantization packs depends on the version, and experts were once left out.
    """
    counts = {"linear": 0, "experts": 0}
    for module in model.modules():
        for packed in packed_weights(module).values():
            counts["linear" if len(packed.plain_shape) == 2 else "experts"] += packed.plain_shape.numel()
    return counts if any(counts.values()) else None
