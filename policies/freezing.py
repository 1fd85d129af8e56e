"""Freezing: the first decoder layers keep their weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from policies.wrapping import find_layers
from utils.errors import ConfigError


def freeze_layers(model: nn.Module, decoder: Any, num_layers: int) -> None:
    """Freeze the first `num_layers` layers of `decoder`, with their adapters.

    Parameters outside the layers stay trainable, embeddings included. If the embeddings are trained, gradients pass
    through the frozen layers; under LoRA, which trains nothing below them, they end above.

    Args:
        model: the whole model, with its adapters.
        decoder: the submodule whose layers are counted.

    Raises:
        ConfigError: if there are fewer layers, or nothing is left to train.
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
