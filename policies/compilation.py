"""torch.compile, one layer at a time: layers are alike, so one graph serves all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from utils.errors import ConfigError


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile each layer at its first call. Raises ConfigError if there is none."""
    if not layers:
        raise ConfigError("--compile: this model names no repeated layers, which are what is compiled; leave it out")
    for layer in layers:
        layer.compile()
