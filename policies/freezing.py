"""Freezing: the first layers keep their weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from policies.wrapping import find_layers
from utils.errors import ConfigError


def freeze_layers(model: nn.Module, stacks: Sequence[nn.Module], num_layers: int) -> None:
    """Freeze the first `num_layers` layers of each stack, with their adapters.

    Parameters outside the layers stay trainable, embeddings included. If the embeddings are trained, gradients pass
    through the frozen layers; under LoRA, which trains nothing below them, they end above.

    Args:
        model: the whole model, with its adapters.
        stacks: the submodules whose layers are counted: a decoder; or an encoder and a decoder.

    Raises:
        ConfigError: if one has fewer layers, or nothing is left to train.
    """
    layers_of = [find_layers(stack)[::-1] for stack in stacks]  # from the first to the last
    most = min(map(len, layers_of))
    if num_layers > most:
        has = str(most) if len(layers_of) == 1 else f"{' and '.join(str(len(layers)) for layers in layers_of)}"
        raise ConfigError(
            f"--num_freeze_layers: {num_layers} layers to freeze, but this model has {has}; "
            + (f"give at most {most}" if most else "leave --freeze_layers out")
        )
    for layers in layers_of:
        for layer in layers[:num_layers]:
            layer.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"--num_freeze_layers: with {num_layers} of {most} layers frozen nothing is trainable, because "
            "--use_peft trains adapters in layers only; freeze fewer"
        )
