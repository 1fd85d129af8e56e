"""A digest that tells whether a base model is the one that a checkpoint was trained on, without reading all of it."""

from __future__ import annotations

from torch import nn

from configs.training import TrainConfig
from policies.weights.fingerprint import fingerprint_files
from policies.weights.stored import weight_files


def base_fingerprint(model: nn.Module, train: TrainConfig) -> str | None:
    """A digest of the weights that the run does not train and so does not save; None if it trains all of them."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return None
    # Random weights are in no file; they follow from the seed.
    return f"random {train.seed}" if train.random_weights else fingerprint_files(weight_files(train.model_name))
