"""Freezing: the first decoder layers keep the weights that they came with."""

from __future__ import annotations

from typing import Any

from torch import nn

from policies.wrapping import find_layers
from utils.errors import ConfigError


def freeze_layers(model: nn.Module, decoder: Any, num_layers: int) -> None:
    """Freeze the first `num_layers` layers of `decoder`, adapters in them included.

    What stands outside the layers stays trained, the embeddings too; so gradients pass through frozen layers where
    the embeddings are trained, and end above them under LoRA, which trains nothing below.

    Args:
        model: the model that trains, with its adapters.
        decoder: the part of it whose layers are counted.

    Raises:
        ConfigError: where there are fewer layers, or nothing would be left to train.
    """
    layers = find_layers(decoder)[::-1]  # from the first to the last
    if num_layers > len(layers):
        raise ConfigError(
            f"--num_freeze_layers: {num_layers} layers to freeze, but this model has {len(layers)}; "
            + (f"give at most {len(layers)}" if layers else "leave --freeze_layers out")
        )
    for layer in layers[:num_layers]:
        layer.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"--num_freeze_layers: with {num_layers} of {len(layers)} layers frozen nothing is trainable, because "
            "--use_peft trains adapters in layers only; freeze fewer"
        )
